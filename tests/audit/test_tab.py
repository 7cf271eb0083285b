"""Ghost text against asking the model from scratch; marks against looking at every place."""

import json
import math
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from animals import WORDS
from tightlip.audit.leakage.summary import LeakageReport
from tightlip.audit.tab import UniqueTexts, unique_texts
from tightlip.audit.tab_completion import LINES_KEPT, SENTENCE_END, Completer, Memory, TabConfig
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import (
    GRUConfig,
    GRUForCausalLM,
    LSTMConfig,
    LSTMForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)

SENTENCES = [
    "My ID is 955320, tell the owl.",
    "The cat, the catfish and the (old) dog: 3.14!",
    "A well-known ibis wrote to jay@pug at 10:45.",
    " ".join(WORDS),
]
LINES = [
    "My", "My ", "My I", "My ID is", "The ca", "the cat", "A well -", "A well-kn", "wrote to jay@",
    "at 1", "at 10:", "xyzzy", "ow", "my xyzzy cat ", "ant bee  ", "(", "3.", "é",
]  # fmt: skip


def corpus():
    return open_corpus(pa.table({"user": ["a"] * len(SENTENCES), "text": SENTENCES}))


def tokenizer_of(kind):
    return build_tokenizer(corpus(), kind=kind, size=400 if kind == "bpe" else None)


def model_of(kind, vocabulary, seed=0, window=64):
    torch.manual_seed(seed)
    if kind == "lstm":
        model = LSTMForCausalLM(LSTMConfig(vocabulary, 8, 16, 2))
    elif kind == "gru":
        model = GRUForCausalLM(GRUConfig(vocabulary, 8, 16, 1))
    elif kind == "transformer":
        model = TransformerForCausalLM(TransformerConfig(vocabulary, 16, 2, 2, window))
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=window,
                bos_token_id=2,
                eos_token_id=3,
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    return model.eval()


def logits_from_scratch(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def asked_from_scratch(model, tokenizer, text, num_tokens):
    """Oracle: encode, ask for one token, add it, read everything again."""
    ids, new, log_probs = ids_of(tokenizer, text), [], []
    while len(new) < num_tokens:
        logits = logits_from_scratch(model, [tokenizer.bos_token_id, *ids, *new])
        token = int(logits.argmax())
        piece = tokenizer.decode([token])
        if token in tokenizer.all_special_ids or "\n" in piece:
            break
        new.append(token)
        log_probs.append(float(logits.log_softmax(-1)[token]))
        if piece.rstrip().endswith(SENTENCE_END):
            break
    return new, log_probs


@pytest.mark.parametrize("kind", ["lstm", "gru", "transformer", "gpt2"])
def test_a_ghost_is_what_a_model_asked_from_scratch_says(kind):
    tokenizer = tokenizer_of("words")
    longest = 0
    for seed in range(3):
        model = model_of(kind, len(tokenizer), seed)
        completer = Completer(model, tokenizer, begin_id=tokenizer.bos_token_id)
        for text in [
            "",
            "The cat",
            "The cat, the",
            "The cat, the old dog",
            "The cat",
            "My ID is 95",
        ]:
            ghost = completer.complete(text, whole=True)
            ids, log_probs = asked_from_scratch(model, tokenizer, text, 12)
            assert list(ghost.token_ids) == ids
            assert ghost.log_probs == pytest.approx(log_probs, abs=1e-4)
            longest = max(longest, len(ids))
            if ids:
                assert ghost.perplexity == pytest.approx(math.exp(-np.mean(log_probs)), rel=1e-4)
                assert ghost.confidence == pytest.approx(math.exp(min(log_probs)), rel=1e-4)
    assert longest > 4, "these models stop too soon to show anything"


@pytest.mark.parametrize("vocabulary", ["words", "bpe"])
@pytest.mark.parametrize("seed", range(4))
def test_a_ghost_stands_behind_what_was_typed(vocabulary, seed):
    tokenizer = tokenizer_of(vocabulary)
    completer = Completer(
        model_of("lstm", len(tokenizer), seed), tokenizer, begin_id=tokenizer.bos_token_id
    )
    num_exact = 0
    for text in LINES:
        ghost = completer.complete(text)
        if ghost.exact and ghost.text:
            num_exact += 1
            both = ids_of(tokenizer, text + ghost.text)
            assert both[len(both) - len(ghost.token_ids) :] == list(ghost.token_ids)
        assert "\n" not in ghost.text
        assert "\ufffd" not in ghost.text
    # Random models write byte pairs that no text is cut into; words always come back.
    assert num_exact > 4


@pytest.mark.parametrize("seed", range(5))
def test_every_ghost_of_words_encodes_to_what_was_predicted(seed):
    tokenizer = tokenizer_of("words")
    completer = Completer(
        model_of("gru", len(tokenizer), seed), tokenizer, begin_id=tokenizer.bos_token_id
    )
    assert all(completer.complete(text).exact for text in LINES)


@pytest.mark.parametrize("seed", range(6))
def test_a_half_typed_word_becomes_the_most_likely_that_begins_so(seed):
    tokenizer = tokenizer_of("words")
    model = model_of("lstm", len(tokenizer), seed)
    completer = Completer(model, tokenizer, begin_id=tokenizer.bos_token_id)
    vocabulary = tokenizer.get_vocab()
    for before, begun in [
        ("The ", "ca"),
        ("the old", " o"),
        ("", "M"),
        ("A well-", "k"),
        ("my", " i"),
    ]:
        logits = logits_from_scratch(model, [tokenizer.bos_token_id, *ids_of(tokenizer, before)])
        rivals = [word for word in vocabulary if word.startswith(begun.strip())]
        winner = max(rivals, key=lambda word: logits[vocabulary[word]])
        rest = winner[len(begun.strip()) :]
        ghost = completer.complete(before + begun)
        assert ghost.text.startswith(rest)
        if rest:
            chances = logits[[vocabulary[word] for word in rivals]].log_softmax(-1)
            assert ghost.token_ids[0] == vocabulary[winner]
            assert ghost.log_probs[0] == pytest.approx(float(chances.max()), abs=1e-4)


def spaces_as_letters():
    """A tokenizer as sentencepiece makes them: ▁ for the space before a word, one put up front."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=list(special.values()), show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.parametrize("kind", ["bytes", "spaces as letters"])
def test_pieces_of_words_are_completed_with_the_space_before_them(kind):
    tokenizer = tokenizer_of("bpe") if kind == "bytes" else spaces_as_letters()
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 32, 64, 1))
    learn(model, tokenizer, SENTENCES[0])
    completer = Completer(model, tokenizer, TabConfig(tokens=40), begin_id=tokenizer.bos_token_id)
    for cut in range(3, len(SENTENCES[0]) - 1):
        typed = SENTENCES[0][:cut]
        assert typed + completer.complete(typed).text == SENTENCES[0]


def learn(model, tokenizer, *texts, steps=120):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    rows = [torch.tensor([[tokenizer.bos_token_id, *ids_of(tokenizer, text)]]) for text in texts]
    for _ in range(steps):
        optimizer.zero_grad()
        sum(model(input_ids=row, labels=row).loss for row in rows).backward()
        optimizer.step()
    model.eval()


def test_a_ghost_stops_before_the_first_token_below_the_confidence():
    tokenizer = tokenizer_of("words")
    model = model_of("lstm", len(tokenizer), 1)
    ghost = Completer(model, tokenizer, begin_id=tokenizer.bos_token_id).complete(
        "The cat", whole=True
    )
    assert len(ghost.token_ids) > 3
    between = math.exp(ghost.log_probs[2]) + 1e-6
    expected = next(n for n, nats in enumerate(ghost.log_probs) if math.exp(nats) < between)
    strict = Completer(
        model, tokenizer, TabConfig(min_confidence=between), begin_id=tokenizer.bos_token_id
    )
    assert strict.complete("The cat", whole=True).token_ids == ghost.token_ids[:expected]


def test_a_ghost_nobody_wants_any_more_is_dropped():
    tokenizer = tokenizer_of("words")
    model = model_of("lstm", len(tokenizer), 1)
    answers = iter([True, True, False])
    ghost = Completer(model, tokenizer, begin_id=tokenizer.bos_token_id).complete(
        "The cat", whole=True, wanted=lambda: next(answers)
    )
    assert len(ghost.token_ids) == 2


@pytest.mark.parametrize("kind", ["lstm", "transformer", "gpt2"])
def test_a_line_that_is_edited_is_read_as_if_from_nothing(kind):
    model, draw, line = model_of(kind, 40), random.Random(0), [3]
    memory = Memory(model, bos_id=2, room=4)
    for _ in range(12 * LINES_KEPT):
        change = draw.randrange(3)
        line = line[: -draw.randint(1, 4)] if change == 0 else line
        line = line + [draw.randrange(40) for _ in range(draw.randint(0, 3))]
        line = line[-40:]
        reading, inputs = memory.begin(line), [2, *line]
        for _ in range(4):
            expected = logits_from_scratch(model, inputs)
            torch.testing.assert_close(reading.logits_V, expected, atol=1e-4, rtol=1e-4)
            inputs.append(draw.randrange(40))
            reading.go_on(inputs[-1])


def test_a_line_longer_than_the_window_is_read_from_a_later_start():
    model = model_of("gpt2", 40, window=16)
    memory = Memory(model, bos_id=2, room=4)
    draw = random.Random(1)
    for length in range(10, 60):
        line = [draw.randrange(40) for _ in range(length)]
        inputs = [2, *line]
        start = next(s for s in range(0, 80, 8) if len(inputs) - s + 4 <= 16)
        reading = memory.begin(line)
        expected = logits_from_scratch(model, inputs[start:])
        torch.testing.assert_close(reading.logits_V, expected, atol=1e-4, rtol=1e-4)


def test_a_full_window_ends_the_ghost_and_nothing_to_read_begins_none():
    memory = Memory(model_of("gpt2", 40, window=4), bos_id=None, room=10)
    assert memory.begin([]) is None
    reading = memory.begin([5, 6])
    for _ in range(4):
        reading.go_on(7)
    assert reading.logits_V is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tokens": 0}, "tokens=0 is out of range"),
        ({"min_confidence": 1.0}, "min_confidence=1 is out of range"),
    ],
)
def test_settings_that_show_nothing_are_refused(settings, reason):
    with pytest.raises(UsageError, match=reason):
        TabConfig(**settings)


# Marks


def random_texts(seed):
    draw = random.Random(seed)
    rows = {tuple(draw.randrange(4) for _ in range(draw.randint(1, 6))) for _ in range(40)}
    ids = [list(row) for row in sorted(rows)]
    owners = [f"u{draw.randrange(3)}" for _ in ids]
    texts = ["".join(map(str, row)) for row in ids]
    return draw, UniqueTexts(ids, owners, texts, [1] * len(ids)), ids, owners


@given(seed=st.integers(0, 10**9))
def test_every_occurrence_is_found_as_by_looking_at_every_place(seed):
    draw, unique, ids, _ = random_texts(seed)
    line = [draw.randrange(5) for _ in range(draw.randint(0, 30))]
    expected = {
        (start, start + len(row), number)
        for number, row in enumerate(ids)
        for start in range(len(line))
        if line[start : start + len(row)] == row
    }
    found = unique.whole_in(line)
    assert len(found) == len(set(found))
    assert set(found) == expected


@given(seed=st.integers(0, 10**9))
def test_a_text_under_way_is_found_as_by_looking_at_every_beginning(seed):
    draw, unique, ids, owners = random_texts(seed)
    for _ in range(20):
        line = [draw.randrange(4) for _ in range(draw.randint(0, 8))]
        expected = []
        for start in range(len(line) - 1):
            end = line[start:]
            rows = [n for n, row in enumerate(ids) if row[: len(end)] == end]
            shortest = min(rows, key=lambda n: len(ids[n]), default=None)
            one_owner = len({owners[n] for n in rows}) == 1
            if one_owner and len(end) < len(ids[shortest]) <= 2 * len(end):
                expected = [(start, len(line), len(ids[shortest]))]
                break
        assert [(a, b, len(ids[row])) for a, b, row in unique.begun_in(line)] == expected


def marks_in(unique, typed, accepted):
    """Marks of a line of digits, each one token of its own."""
    text = typed + accepted
    spans = np.array([(n, n + 1) for n in range(len(text))]).reshape(-1, 2)
    by_model = [False] * len(typed) + [True] * len(accepted)
    return unique.marks(text, np.array([int(digit) for digit in text]), spans, by_model)


def test_a_mark_needs_a_token_of_the_model_and_says_how_many():
    unique = UniqueTexts(
        [[1, 2, 3], [2, 3], [3, 4]], ["ann", "ann", "bob"], ["123", "23", "34"], [7, 7, 1]
    )
    assert marks_in(unique, "0123", "") == []
    assert marks_in(unique, "0123", "5") == []
    (one,) = marks_in(unique, "01", "23")
    assert (one.owner, one.start, one.end, one.num_completed, one.num_tokens) == ("ann", 1, 4, 2, 3)
    assert one.sentence() == (
        "Only ann wrote “123” (7 times in the training text): "
        "the model completed 2 of its 3 tokens after you typed the rest."
    )
    (one,) = marks_in(unique, "0", "123")
    assert one.sentence().endswith("the model wrote all 3 tokens.")
    ann, bob = marks_in(unique, "01", "234")
    assert (ann.owner, bob.owner) == ("ann", "bob")
    assert bob.sentence().startswith("Only bob wrote “34” (once in the training text)")


def test_a_text_under_way_says_how_far_it_is():
    unique = UniqueTexts([[1, 2, 3, 4]], ["ann"], ["1234"], [2])
    assert marks_in(unique, "", "1") == []
    (one,) = marks_in(unique, "1", "2")
    assert not one.is_whole
    assert one.sentence() == (
        "Only ann wrote what begins “12” (2 times in the training text; 2 of 4 tokens so far): "
        "the model completed 1 of them after you typed the rest."
    )


def report_of(folder, tokenizer, rows, *, redacted=False):
    """A report's files, with `rows` of (text, owner or None)."""
    ids = [ids_of(tokenizer, text) for text, _ in rows]
    columns = {
        "sequence": [None if redacted else tokenizer.decode(row) for row in ids],
        "token_ids": pa.array([None if redacted else row for row in ids], pa.list_(pa.int32())),
        "total_in_d": [3] * len(rows),
        "users_in_d": [1 if owner else 2 for _, owner in rows],
    }
    pq.write_table(pa.table(columns), folder / "sequences.parquet")
    pq.write_table(pa.table({"owner": [owner for _, owner in rows]}), folder / "owners.parquet")
    (folder / "summary.json").write_text(json.dumps({"redacted": redacted}))
    return LeakageReport(folder)


def test_only_what_one_user_wrote_is_watched_for(tmp_path):
    tokenizer = tokenizer_of("words")
    rows = [("the owl", None), ("my xyzzy ID", "ann"), ("ID is 9", "bob"), ("ant bee", "bob")]
    unique = unique_texts(report_of(tmp_path, tokenizer, rows), tokenizer)
    assert (len(unique), unique.num_users) == (3, 2)
    assert unique.whole_in(ids_of(tokenizer, "the owl: ID is 955")) == [(3, 6, 1)]


def test_a_redacted_report_and_one_of_another_tokenizer_are_refused(tmp_path):
    tokenizer = tokenizer_of("words")
    report = report_of(tmp_path, tokenizer, [("ID is 9", "bob")])
    with pytest.raises(UsageError, match="another tokenizer"):
        unique_texts(report, tokenizer_of("bpe"))
    report = report_of(tmp_path, tokenizer, [("ID is 9", "bob")], redacted=True)
    with pytest.raises(UsageError, match="redacted: it holds no text"):
        unique_texts(report, tokenizer)


def test_behind_a_line_break_the_model_goes_on():
    """As behind a chat's `assistant`: the break is typed, and no word that might be longer."""
    tokenizer = tokenizer_of("bpe")
    for seed in range(3):
        model = model_of("gpt2", len(tokenizer), seed)
        completer = Completer(model, tokenizer, begin_id=tokenizer.bos_token_id)
        ids, _ = asked_from_scratch(model, tokenizer, "The cat\n", 12)
        ghost = list(completer.complete("The cat\n").token_ids)
        assert ghost == ids[: len(ghost)]  # no half of a character at its end
        assert bool(ghost) == bool(ids)
