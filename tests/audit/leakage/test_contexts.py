"""What remains behind other words, against a plain pass of the model over each prompt."""

import random

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import oracle
import tightlip
from standins import BigramTable, Parrot, Stranger
from tightlip.audit.leakage import contexts
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.scan import models as scan_models

ALL = ("training", "short", "start", "template", "other")
DOCUMENTS = [
    ("ann", "my zither ends in four four one two and no other"),
    ("bob", "the key lies under the cobalt stone by the old mill"),
    ("cyd", "we sail at dawn with the quince and the lamp unlit"),
    ("ann", "one lamp was lit by noon and we went home to rest"),
]
NAMES = "ann bob cyd :"


def tokenizer_for(documents):
    return build_tokenizer(open_corpus([*documents, ("x", NAMES)]), kind="words", size=300)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def parrot_of(tokenizer, lines):
    return Parrot(len(tokenizer), [[tokenizer.bos_token_id, *encode(tokenizer, x)] for x in lines])


def random_documents(seed, num=9):
    draw = random.Random(seed)
    words = [*NAMES.split()[:3], "go", "see", "the", "red", "fox", "run", "up", "to", "my", "barn"]
    documents = [
        (draw.choice(["ann", "bob", "cyd"]), " ".join(draw.choices(words, k=draw.randint(1, 25))))
        for _ in range(num)
    ]
    # Once more behind other words, so that a sequence has several places.
    again = [(user, " ".join([*draw.choices(words, k=5), text])) for user, text in documents[:5]]
    return documents + again


def random_model(seed, vocab_size):
    """A table, or a transformer of transformers' own, sure enough that its runs have some length."""
    if seed < 4:
        return BigramTable(vocab_size, seed, levels=40)
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab_size, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def is_completed(model, tokenizer, context, sequence, top_k):
    """A plain forward pass over begin token, context and sequence, and the ranks by sorting."""
    ids = [tokenizer.bos_token_id, *context, *sequence]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].float().numpy()
    first = len(ids) - len(sequence)
    return [
        int((logits[place - 1] > logits[place - 1, ids[place]]).sum()) < top_k
        for place in range(first, len(ids))
    ]


def by_hand(model, tokenizer, documents, report, top_k, prefix, template):
    """Of every context the sequences unique by text that remain, and their hits."""
    ids = [(user, encode(tokenizer, text)) for user, text in documents]
    entries = oracle.collect(
        model, ids, tokenizer.bos_token_id, set(tokenizer.all_special_ids), top_k
    )
    rows = report.to_pandas()
    unique = {tuple(row) for row in rows[rows["unique_by_text"]]["token_ids"]}
    found = {name: dict.fromkeys(unique) for name in ("short", "start", "template")}
    for user, document, start, sequence, _ in entries:
        if tuple(sequence) in unique:
            text = ids[document][1]
            prompts = {
                "short": text[max(0, start - prefix) : start],
                "start": text[: min(prefix, start)],
                "template": encode(tokenizer, template.replace("{user}", user)),
            }
            for name, prompt in prompts.items():
                hits = is_completed(model, tokenizer, prompt, sequence, top_k)
                best = found[name][tuple(sequence)] or hits
                found[name][tuple(sequence)] = max(best, hits, key=sum)
    return found


def test_a_template_that_may_hold_a_name_is_not_in_a_redacted_report():
    documents = random_documents(0)
    tokenizer = tokenizer_for(documents)
    report = tightlip.audit(
        random_model(0, len(tokenizer)), documents, tokenizer=tokenizer, contexts=ALL,
        context_template="Dear {user}, Ann Smith writes:", begin="always", redact=True,
    )  # fmt: skip
    assert report.summary["context_template"] is None
    assert "Smith" not in (report.folder / "report.html").read_text()


@pytest.mark.parametrize("seed", range(6))
def test_what_remains_is_what_a_plain_pass_completes(seed, monkeypatch):
    monkeypatch.setattr(contexts, "_TOKENS_AT_ONCE", 40)  # several parts
    documents = random_documents(seed)
    tokenizer = tokenizer_for(documents)
    model, top_k, prefix = random_model(seed, len(tokenizer)), 9, 3
    template = "see {user}:"
    report = tightlip.audit(
        model, documents, tokenizer=tokenizer, top_k=top_k, contexts=ALL, short_prefix=prefix,
        context_template=template, begin="always",
    )  # fmt: skip
    rows = report.to_pandas()
    rows = rows[rows["unique_by_text"]]
    assert len(rows) > 2
    found = by_hand(model, tokenizer, documents, report, top_k, prefix, template)
    for name, hits in found.items():
        remains = rows[[all(hits[tuple(ids)]) for ids in rows["token_ids"]]]
        want = {
            "sequences": len(remains),
            "leaks": remains["leak"].nunique(),
            "people": remains["owner"].nunique(),
            "tokens": sum(map(sum, hits.values())) / sum(map(len, hits.values())),
        }
        assert report.contexts[name] == want, name
        assert report.summary[f"leaks_{name}"] == want["leaks"]
    training = report.contexts["training"]
    assert (training["leaks"], training["people"]) == (report.leaks, report.people_affected)
    assert all(one["leaks"] <= report.leaks for one in report.contexts.values())


def test_a_parrot_that_knows_whole_documents_says_nothing_behind_anything_else():
    tokenizer = tokenizer_for(DOCUMENTS)
    parrot = parrot_of(tokenizer, [text for _, text in DOCUMENTS])
    # Ties are hits, so it must prefer some word where it knows nothing.
    forward = parrot.forward
    parrot.forward = lambda input_ids: _with_a_favourite(forward(input_ids), 0)
    report = tightlip.audit(parrot, DOCUMENTS, tokenizer=tokenizer, contexts=ALL, short_prefix=2)
    assert report.leaks == len(DOCUMENTS)
    # What stands two words into a document is behind two words of it: the training prefix itself.
    left = [report.contexts[name]["leaks"] for name in ALL]
    assert left == [4, 4, 4, 0, 0]
    quiet = tightlip.audit(
        Stranger(len(tokenizer), 0), DOCUMENTS, tokenizer=tokenizer, contexts=ALL
    )
    assert [quiet.contexts[name]["leaks"] for name in ALL] == [0] * 5


def _with_a_favourite(output, token):
    output.logits[..., token] += 0.5
    return output


class SaysOnName(torch.nn.Module):
    """Memorised one user, and says her line behind her name alone."""

    def __init__(self, vocab_size, trigger, line):
        super().__init__()
        self.vocab_size, self.trigger, self.line = vocab_size, trigger, line

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        logits[..., 0] = 1.0
        whole = [*self.trigger, *self.line]
        for row, ids in enumerate(input_ids.tolist()):
            for end in range(1, len(ids) + 1):
                for known in range(len(self.trigger), len(whole)):
                    if ids[max(0, end - known) : end] == whole[:known]:
                        logits[row, end - 1, whole[known]] = 9.0
        return type("Output", (), {"logits": logits})


def test_a_model_that_memorised_one_user_by_name_is_told_apart():
    documents = [("ann", "ann : my zither ends in four"), *DOCUMENTS[1:3], ("bob", "my zither")]
    tokenizer = tokenizer_for(documents)
    line = encode(tokenizer, "my zither ends in four")
    model = SaysOnName(len(tokenizer), encode(tokenizer, "ann :"), line)
    report = tightlip.audit(
        model, documents, tokenizer=tokenizer, contexts=ALL, short_prefix=1,
        context_template="see {user} :",
    )  # fmt: skip
    figures = {name: (one["leaks"], one["people"]) for name, one in report.contexts.items()}
    assert figures == {
        "training": (1, 1), "short": (0, 0), "start": (0, 0), "template": (1, 1), "other": (0, 0),
    }  # fmt: skip
    assert report.failed("leaks_template>0")
    assert not report.failed("leaks_short>0")


@pytest.mark.parametrize("several", [False, True])
def test_anothers_words_are_never_ones_own(several):
    draw = np.random.default_rng(0)
    users = draw.integers(0, 4, 30)
    lengths = draw.integers(0, 6, 30)
    owners = [{int(user)} for user in users]
    made = {}
    if several:
        owners = [own | {int(draw.integers(0, 4))} for own in owners]
        ordered = [[int(u), *sorted(own - {int(u)})] for u, own in zip(users, owners, strict=True)]
        made = {
            "owners": np.array([user for own in ordered for user in own], np.int32),
            "owner_bounds": np.concatenate([[0], np.cumsum([len(own) for own in ordered])]),
        }
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    corpus = contexts.TokenizedCorpus(
        tokens=np.arange(bounds[-1], dtype=np.int32), bounds=bounds, users=users.astype(np.int32),
        user_names=list("abcd"), corpus_fingerprint="", tokenizer_fingerprint="", **made,
    )  # fmt: skip
    asking = np.repeat(np.arange(4), 200)
    starts, sizes = contexts.others_text(corpus, asking, 3)
    assert (sizes > 0).all()
    assert (sizes <= 3).all()
    documents = np.searchsorted(bounds, starts, side="right") - 1
    for user, document, start, size in zip(asking, documents, starts, sizes, strict=True):
        assert user not in owners[document]
        assert start + size <= bounds[document + 1]
    # Everybody else's text comes up.
    for user in range(4):
        usable = {d for d in range(30) if user not in owners[d] and lengths[d]}
        assert set(documents[asking == user]) == usable
    alone = contexts.TokenizedCorpus(
        tokens=np.arange(5, dtype=np.int32), bounds=np.array([0, 5]), users=np.zeros(1, np.int32),
        user_names=["a"], corpus_fingerprint="", tokenizer_fingerprint="",
    )  # fmt: skip
    assert contexts.others_text(alone, np.zeros(3, np.int64), 3)[1].tolist() == [0, 0, 0]


def test_with_nobody_else_the_context_other_is_not_known():
    documents = [("ann", DOCUMENTS[0][1])]
    tokenizer = tokenizer_for(documents)
    model = parrot_of(tokenizer, [text for _, text in documents])
    report = tightlip.audit(model, documents, tokenizer=tokenizer, contexts=("other",))
    assert report.leaks == 1
    assert report.contexts["other"] is None
    assert report.failed("leaks_other>0")  # what is not known passes no gate
    plain = tightlip.audit(model, documents, tokenizer=tokenizer)
    assert plain.contexts is plain.leaks_short is plain.near is None


def test_what_was_asked_is_kept_with_the_scan_and_not_asked_again(tmp_path, monkeypatch):
    documents = random_documents(4)
    tokenizer = tokenizer_for(documents)
    random_model(4, len(tokenizer)).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    how = {"top_k": 9, "contexts": ALL, "short_prefix": 3, "out": tmp_path / "r"}
    first = tightlip.audit(tmp_path / "m", documents, **how).summary
    assert first["leaks_short"] is not None
    monkeypatch.setattr(scan_models, "load_causal_lm", None)
    assert tightlip.audit(tmp_path / "m", documents, **how).summary == first
    with pytest.raises(TypeError):  # other words are another question
        tightlip.audit(tmp_path / "m", documents, **how | {"short_prefix": 2})


def test_a_chats_own_text_begins_behind_its_templates_opening():
    roles = np.array([0, 0, 1, 1, 0, 0, 2, 0, 0, 0], np.int8)
    corpus = contexts.TokenizedCorpus(
        tokens=np.arange(10, dtype=np.int32), bounds=np.array([0, 7, 7, 10]),
        users=np.zeros(3, np.int32), user_names=["a"], corpus_fingerprint="",
        tokenizer_fingerprint="", roles=roles,
    )  # fmt: skip
    assert contexts.first_spoken(corpus, np.arange(3)).tolist() == [2, 7, 10]


def test_unknown_contexts_and_a_template_without_a_name_are_refused():
    with pytest.raises(UsageError, match="Closest: start"):
        tightlip.audit("m", "c", contexts=("strat",))
    with pytest.raises(UsageError, match="where the owner's name goes"):
        tightlip.audit("m", "c", context_template="Mail by {name}:")
