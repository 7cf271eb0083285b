"""S, all counts, contexts and perplexities against a report made by brute force."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
import tightlip
from standins import BigramTable
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import GRUConfig, GRUForCausalLM, LSTMConfig, LSTMForCausalLM

WORDS = [
    *("the a we you love hate thee don't o'er night's 7 42 £ € — … 你好 привет мир ñandú école"),
    *[
        "the",
        "we",
        "love",
        "don't",
        "o'er",
        "7",
        "42",
        "你好",
        "привет",
        "мир",
        "ñandú",
        "e\u0301cole",
    ],
    *["👍🏽", "नमस्ते", "שלום", "\u200b", "…", ",", ".", "!", "(", ")", "</s>", "<unk>", "x" * 30],
]


def random_corpus(draw: random.Random) -> list[tuple[str, str]]:
    words = draw.sample(WORDS, draw.randint(1, 8))
    users = [f"user-{i}" for i in range(draw.randint(1, 4))]
    documents = []
    for _ in range(draw.randint(1, 7)):
        length = draw.choice([0, 1, 2, 5, 12])
        documents.append((draw.choice(users), " ".join(draw.choices(words, k=length))))
    documents += draw.choices(documents, k=draw.randint(0, 2))  # repeated documents
    return documents


def random_model(draw: random.Random, vocab_size: int, seed: int) -> torch.nn.Module:
    kind = draw.choice(["table", "table", "lstm", "gru"])
    if kind == "table":
        return BigramTable(vocab_size, seed, levels=draw.choice([2, 6, 40]))
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size, "embedding_size": 6, "hidden_size": 8, "num_layers": 1}
    if kind == "lstm":
        return LSTMForCausalLM(LSTMConfig(**sizes)).eval()
    return GRUForCausalLM(GRUConfig(**sizes)).eval()


def encoded(tokenizer, documents):
    return [
        (user, tokenizer(text, add_special_tokens=False)["input_ids"]) for user, text in documents
    ]


@given(seed=st.integers(0, 10**9))
def test_report_equals_one_model_call_per_prefix(seed: int) -> None:
    draw = random.Random(seed)
    documents = random_corpus(draw)
    kind = draw.choice(["words", "words", "bpe"])
    try:
        size = draw.choice([18, 30]) if kind == "words" else 270
        tokenizer = build_tokenizer(open_corpus(documents), kind=kind, size=size)
    except tightlip.core.errors.UsageError:
        tokenizer = build_tokenizer(open_corpus([("u", "plain words here")]), kind="words", size=30)
    begin, bos = ("never", None) if draw.random() < 0.25 else ("auto", tokenizer.bos_token_id)
    model = random_model(draw, len(tokenizer), seed)
    top_k = draw.randint(1, 5)
    ids = encoded(tokenizer, documents)
    textless = set(tokenizer.all_special_ids) | {0, 1, 2, 3}
    if any(i for _, i in ids) and not any(set(i) - textless for _, i in ids):
        with pytest.raises(tightlip.core.errors.UsageError, match="knows none"):
            tightlip.audit(model, documents, tokenizer=tokenizer)
        return
    expected = oracle.features(model, ids, bos, textless, top_k)
    report = tightlip.audit(
        model,
        documents,
        tokenizer=tokenizer,
        top_k=top_k,
        occurrences=None,
        memory="1MB",
        begin=begin,
    )
    rows = {tuple(row["token_ids"]): row for row in report.sequences.to_pylist()}
    assert rows.keys() == expected.keys()
    for key, want in expected.items():
        row = rows[key]
        for name in ("total_in_s", "users_in_s", "total_in_d", "users_in_d", "copied"):
            assert row[name] == want[name], (key, name)
        assert row["num_tokens"] == len(key)
        assert row["sequence"] == tokenizer.decode(list(key))
        assert row["perplexities"] == pytest.approx(want["perplexities"], rel=1e-4)
        got = sorted(zip(row["context_tokens"], row["contexts"], strict=True))
        assert got == sorted((len(c), tokenizer.decode(c[-32:])) for c in want["contexts"])
    assert report.unique == sum(want["users_in_d"] == 1 for want in expected.values())
    assert report.sequences_in_s == sum(want["total_in_s"] for want in expected.values())
    assert report.fewer_than_p == sum(want["users_in_s"] < 5 for want in expected.values())
