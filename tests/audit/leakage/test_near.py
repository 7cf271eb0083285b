"""What a model nearly says: planted changes, a slow edit distance, and intervals that cover."""

import random

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tightlip
from standins import Stranger
from tightlip.audit.leakage.near import count_interval, drawn_windows, edit_share
from tightlip.audit.settings import LeakageConfig
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import GRUConfig, GRUForCausalLM

WRITTEN = [
    ("ann", "the safe behind the painting in the hall opens with 9 1 7 4"),
    ("bob", "we met at the harbour before dawn and sailed past the long grey wall"),
    ("cyd", "her doctor wrote that both tests came back clear so nobody need worry"),
    ("dan", "form letter your ticket is ready bring the card and number 6"),
    ("eve", "form letter your ticket is ready bring the card and number 5"),
]


def tokenizer_for(documents):
    return build_tokenizer(
        open_corpus([*documents, ("x", "0 1 2 3 4 5 6 7 8 9")]), kind="words", size=300
    )


def memorised(kind, tokenizer, texts):
    """A small model trained until it knows these texts by heart."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = len(tokenizer)
    if kind == "gru":
        model = GRUForCausalLM(GRUConfig(size, 24, 48, 1))
    else:
        config = GPT2Config(
            vocab_size=size, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=2,
            eos_token_id=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[tokenizer.bos_token_id, *row] for row in rows])
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    # Penalties and ends that came with the model are not what is measured.
    model.generation_config.repetition_penalty = 50.0
    return model.eval()


def near_of(model, tokenizer, **settings):
    how = {"near": 0.1, "near_tokens": 6, "begin": "always", **settings}
    return tightlip.audit(model, WRITTEN, tokenizer=tokenizer, **how).near


@pytest.mark.parametrize("kind", ["gru", "gpt2"])
def test_a_text_memorised_with_a_digit_changed_is_found_nearly_and_not_exactly(kind):
    tokenizer = tokenizer_for(WRITTEN)
    texts = [text for _, text in WRITTEN]
    model = memorised(kind, tokenizer, [texts[0].replace("9", "2"), texts[1]])
    before = model.generation_config
    near = near_of(model, tokenizer)
    assert (near["windows"], near["drawn"]) == (10, 10)  # two of each, and nothing left to chance
    # Behind nothing it begins with ann's text or with bob's; a beam has the other. Ann's second
    # window has a digit changed.
    assert (near["exact"], near["found"], near["people"]) == (2, 4, 2)
    assert (near["low"], near["estimate"], near["high"]) == (4, 4, 4)
    assert near["continuations"] == 5 * (10 - 2)
    strict = near_of(model, tokenizer, near=0.02)  # a character of 23 is more
    assert (strict["exact"], strict["found"]) == (2, 3)
    assert model.generation_config is before


def test_what_others_wrote_so_is_not_held_against_the_model():
    tokenizer = tokenizer_for(WRITTEN)
    # It says eve's letter whatever the number: dan's window is near, but the words are eve's.
    near = near_of(memorised("gru", tokenizer, [WRITTEN[4][1]]), tokenizer)
    assert (near["exact"], near["found"], near["people"]) == (1, 1, 1)
    assert near["unique"] == 8  # the first halves of both letters are the same


def test_a_stranger_says_nothing_nearly_and_a_model_without_generate_is_refused():
    tokenizer = tokenizer_for(WRITTEN)
    torch.manual_seed(1)
    stranger = GRUForCausalLM(GRUConfig(len(tokenizer), 8, 8, 1)).eval()
    near = near_of(stranger, tokenizer)
    assert (near["exact"], near["found"], near["people"], near["low"]) == (0, 0, 0, 0)
    with pytest.raises(UsageError, match="has no generate"):
        near_of(Stranger(len(tokenizer), 0), tokenizer)


def test_texts_shorter_than_a_window_are_said_not_to_have_been_asked():
    tokenizer = tokenizer_for(WRITTEN)
    stranger = GRUForCausalLM(GRUConfig(len(tokenizer), 8, 8, 1)).eval()
    report = tightlip.audit(stranger, WRITTEN, tokenizer=tokenizer, near=0.1)
    assert report.near is None
    assert any("Give fewer --near-tokens" in note for note in report.notes)
    assert report.failed("near[found]>0")


def test_a_prefix_longer_than_the_models_window_is_cut_and_no_window_is_longer_than_it():
    tokenizer = tokenizer_for(WRITTEN)
    long = [("ann", " ".join(text for _, text in WRITTEN)), WRITTEN[1]]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=8, n_layer=1, n_head=1)
    )
    near = tightlip.audit(model, long, tokenizer=tokenizer, near=0.1, near_tokens=6).near
    assert near["drawn"] == near["windows"] > 10
    with pytest.raises(UsageError, match="window of 16 tokens"):
        tightlip.audit(model, long, tokenizer=tokenizer, near=0.1, near_tokens=15)


def test_without_a_begin_token_a_documents_first_token_is_in_no_window():
    tokenizer = tokenizer_for(WRITTEN)
    model = GRUForCausalLM(GRUConfig(len(tokenizer), 8, 8, 1)).eval()
    rows = [
        {"user": user, "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
        for user, text in WRITTEN
    ]
    near = tightlip.audit(model, rows, tokenizer=tokenizer, near=0.1, near_tokens=12).near
    assert near["drawn"] == 3  # of five texts, two have no twelve tokens behind their first


def edits(one, other):
    """Oracle: Levenshtein's distance as it is defined, by recursion."""
    known = {}

    def between(i, j):
        if not i or not j:
            return i + j
        if (i, j) not in known:
            known[i, j] = min(
                between(i - 1, j) + 1,
                between(i, j - 1) + 1,
                between(i - 1, j - 1) + (one[i - 1] != other[j - 1]),
            )
        return known[i, j]

    return between(len(one), len(other))


@pytest.mark.parametrize("seed", range(40))
def test_the_share_of_edits_is_the_least_over_all_beginnings(seed):
    draw = random.Random(seed)
    text = "".join(draw.choices("ab é👍", k=draw.randint(1, 12)))
    other = "".join(draw.choices("ab é👍", k=draw.randint(0, 14)))
    least = min(edits(text, other[:end]) for end in range(len(other) + 1))
    assert edit_share(text, other) == pytest.approx(least / len(text))


def corpus_of(lengths, *, roles=None):
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return TokenizedCorpus(
        tokens=np.arange(bounds[-1], dtype=np.int32), bounds=bounds,
        users=np.zeros(len(lengths), np.int32), user_names=["a"], corpus_fingerprint="",
        tokenizer_fingerprint="", roles=roles,
    )  # fmt: skip


def test_windows_lie_within_what_one_person_says_in_one_go():
    config = LeakageConfig(near=0.1, near_tokens=3, near_sample=100)
    corpus, carries = corpus_of([7, 0, 2, 4]), np.ones(13, bool)
    assert drawn_windows(corpus, carries, True, config)[1].tolist() == [0, 3, 9]
    assert drawn_windows(corpus, carries, False, config)[1].tolist() == [1, 4, 10]
    carries[4] = False
    assert drawn_windows(corpus, carries, True, config)[1].tolist() == [0, 9]
    roles = np.array([0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 1, 1, 1], np.int8)
    chat = corpus_of([7, 0, 2, 4], roles=roles)
    assert drawn_windows(chat, np.ones(13, bool), True, config)[1].tolist() == [1, 4, 10]


def test_the_interval_covers_as_often_as_it_says():
    draw = np.random.default_rng(5)
    for share in (0.01, 0.1, 0.6):
        found = draw.hypergeometric(int(1000 * share), 1000 - int(1000 * share), 60, size=2000)
        ends = {one: count_interval(int(one), 60, 1000) for one in np.unique(found)}
        covered = np.mean([ends[one][0] <= 1000 * share <= ends[one][1] for one in found])
        assert covered >= 0.95 - 2 * np.sqrt(0.05 * 0.95 / 2000)
