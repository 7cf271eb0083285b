"""Ratios to a public model against the definition, token by token and character by character."""

import math
import random

import numpy as np
import pytest
import torch

import oracle
import tightlip
from standins import BigramTable
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import GRUConfig, GRUForCausalLM, LSTMConfig, LSTMForCausalLM

TEXTS = [
    "the red fox ran to the red barn",
    "a fox, a hen!  and   2 eggs",
    "nobody knew the password was tangerine",
    "the password? ask at the red barn",
    "naïve café — 你好 👍🏽 the fox",
    "  leading and trailing  ",
    "to the red barn\n\nto the hen",
    "",
    "fox",
]
USERS = ["ann", "bob", "cyd", "ann", "dan", "eve", "bob", "eve", "dan"]
DOCUMENTS = list(zip(USERS, TEXTS, strict=True))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def word_tokenizer(size=40):
    return build_tokenizer(open_corpus(DOCUMENTS), size=size)


def byte_tokenizer(size=300):
    return build_tokenizer(open_corpus(DOCUMENTS), kind="bpe", size=size)


def saved_model(folder, tokenizer, *, seed, recurrent=GRUForCausalLM):
    """A random model in a folder, sure enough of itself that ratios spread."""
    torch.manual_seed(seed)
    config = GRUConfig if recurrent is GRUForCausalLM else LSTMConfig
    model = recurrent(config(len(tokenizer), 6, 8, 1)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def encoded(tokenizer):
    return [
        (user, tokenizer(text, add_special_tokens=False)["input_ids"]) for user, text in DOCUMENTS
    ]


def entries_of(model, tokenizer, top_k):
    textless = set(tokenizer.all_special_ids) | {0, 1, 2, 3}
    return oracle.collect(model, encoded(tokenizer), tokenizer.bos_token_id, textless, top_k)


def log_probs_of(model, tokenizer):
    """Per document, each token's log-probability, None where it is not predicted."""
    return [
        [None if one is None else one[1] for one in oracle.predictions(model, ids, tokenizer.bos_token_id)]
        for _, ids in encoded(tokenizer)
    ]  # fmt: skip


def perplexity(log_probs, num_tokens):
    """exp of minus their sum per token; None where there are none or one is not known."""
    if not log_probs or None in log_probs:
        return None
    return math.exp(-sum(log_probs) / num_tokens)


def by_token(entry, public_log_probs, *_):
    _, document, start, ids, _ = entry
    return perplexity(public_log_probs[document][start : start + len(ids)], len(ids))


def visible_span(text, span):
    """A token's characters without the spaces before its first visible one."""
    start, end = span
    inside = text[start:end]
    return (start + len(inside) - len(inside.lstrip()), end) if inside.strip() else span


def spans_of(tokenizer, text):
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [visible_span(text, span) for span in encoding["offset_mapping"]]


def by_character(entry, public_log_probs, audited_tokenizer, public_tokenizer):
    """Sum over the public tokens that start inside the run, per token of the audited model."""
    _, document, start, ids, _ = entry
    text = TEXTS[document]
    own = spans_of(audited_tokenizer, text)
    first, last = own[start][0], own[start + len(ids) - 1][1]
    inside = [
        log_prob
        for (begin, _), log_prob in zip(
            spans_of(public_tokenizer, text), public_log_probs[document], strict=True
        )
        if first <= begin < last
    ]
    return perplexity(inside, len(ids))


def expected(model, tokenizer, public_model, public_tokenizer, rule, top_k):
    """token ids -> (sorted perplexities, the public ones beside them, the largest ratio)."""
    public_log_probs = log_probs_of(public_model, public_tokenizer)
    found = {}
    for entry in entries_of(model, tokenizer, top_k):
        public = rule(entry, public_log_probs, tokenizer, public_tokenizer)
        found.setdefault(tuple(entry[3]), []).append((entry[4], public))
    return {
        ids: {
            "pairs": sorted(pairs, key=lambda pair: (pair[0], pair[1] or 0)),
            "ratio": max((public / own for own, public in pairs if public), default=None),
            "users_in_d": len({u for u, hay in encoded(tokenizer) if oracle.occurrences(list(ids), hay)}),
        }
        for ids, pairs in found.items()
    }  # fmt: skip


def near(value):
    return None if value is None else pytest.approx(value, rel=1e-4)


def check(report, want, thresholds):
    rows = {tuple(row["token_ids"]): row for row in report.sequences.to_pylist()}
    assert rows.keys() == want.keys()
    for ids, row in rows.items():
        pairs = sorted(
            zip(row["perplexities"], row["public_perplexities"], strict=True),
            key=lambda pair: (round(pair[0], 4), pair[1] or 0),
        )
        pairs_wanted = sorted(want[ids]["pairs"], key=lambda p: (round(p[0], 4), p[1] or 0))
        for (own, public), (own_wanted, public_wanted) in zip(pairs, pairs_wanted, strict=True):
            assert own == pytest.approx(own_wanted, rel=1e-4)
            assert public == near(public_wanted)
        assert row["ratio"] == near(want[ids]["ratio"])
    unique = [one["ratio"] for one in want.values() if one["users_in_d"] == 1]
    known = [ratio for ratio in unique if ratio is not None]
    assert report.unique == len(unique)
    assert report.leakage_epsilon == pytest.approx(max(known), rel=1e-4)
    assert report.curated == {f"{t:g}": sum(r >= t for r in known) for t in thresholds}


def a_third(tokenizer):
    """A k at which random models are often right, so that runs come in several lengths."""
    return len(tokenizer) // 3


def in_report_order(rows):
    """Largest ratio first and null last, then the longest, then by ids."""
    ratio = lambda row: math.inf if row["ratio"] is None else -row["ratio"]  # noqa: E731
    return sorted(rows, key=lambda row: (ratio(row), -row["num_tokens"], row["token_ids"]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_with_one_tokenizer_ratios_are_per_token(tmp_path, kind, seed):
    tokenizer = word_tokenizer() if kind == "words" else byte_tokenizer()
    model = saved_model(tmp_path / "m", tokenizer, seed=seed)
    public = saved_model(tmp_path / "p", tokenizer, seed=seed + 50, recurrent=LSTMForCausalLM)
    thresholds = (0.5, 1.0, 1.5, 20.0)
    report = tightlip.audit(
        tmp_path / "m",
        DOCUMENTS,
        public_model=tmp_path / "p",
        top_k=a_third(tokenizer),
        occurrences=None,
        thresholds=thresholds,
    )
    want = expected(model, tokenizer, public, tokenizer, by_token, a_third(tokenizer))
    assert len(want) > 5
    check(report, want, thresholds)
    assert report.cross_tokenizer is False
    assert report.public_model == str(tmp_path / "p")
    rows = report.sequences.to_pylist()
    assert rows == in_report_order(rows)


def predictions_of(model, tokenizer):
    """Per document, each token's rank and log-probability, None where it is not predicted."""
    bos = tokenizer.bos_token_id
    return [oracle.predictions(model, ids, bos) for _, ids in encoded(tokenizer)]


def by_definition(entries, inside, top_k):
    """token ids -> the least probability of an occurrence, and whether one of them is not said;
    `inside` gives the public model's answers over a run."""
    found = {}
    for entry in entries:
        answers = inside(entry)
        is_known = bool(answers) and None not in answers
        prior = math.exp(sum(one[1] for one in answers)) if is_known else None
        is_said = is_known and all(one[0] < top_k for one in answers)
        found.setdefault(tuple(entry[3]), []).append((prior, is_said))
    return {
        ids: (
            min((prior for prior, _ in several if prior is not None), default=None),
            not all(is_said for _, is_said in several),
        )
        for ids, several in found.items()
    }


@pytest.mark.parametrize("audited_kind", ["words", "bpe"])
@pytest.mark.parametrize("crosses", [False, True])
def test_what_anybody_would_say_is_what_the_public_model_completes_each_time(
    tmp_path, audited_kind, crosses
):
    kinds = {"words": word_tokenizer(), "bpe": byte_tokenizer()}
    tokenizer = kinds.pop(audited_kind)
    public_tokenizer = kinds.popitem()[1] if crosses else tokenizer
    model = saved_model(tmp_path / "m", tokenizer, seed=0)
    public = saved_model(tmp_path / "p", public_tokenizer, seed=50)
    top_k = a_third(tokenizer) * 2
    report = tightlip.audit(tmp_path / "m", DOCUMENTS, public_model=tmp_path / "p", top_k=top_k)
    answers = predictions_of(public, public_tokenizer)

    def inside(entry):
        _, document, start, ids, _ = entry
        if not crosses:
            return answers[document][start : start + len(ids)]
        own = spans_of(tokenizer, TEXTS[document])
        first, last = own[start][0], own[start + len(ids) - 1][1]
        theirs = spans_of(public_tokenizer, TEXTS[document])
        both = zip(theirs, answers[document], strict=True)
        return [answer for (begin, _), answer in both if first <= begin < last]

    want = by_definition(entries_of(model, tokenizer, top_k), inside, top_k)
    rows = report.to_pandas()
    for ids, prior, beyond in zip(
        rows["token_ids"], rows["prior"].tolist(), rows["beyond_prior"], strict=True
    ):
        assert (None if math.isnan(prior) else prior) == near(want[tuple(ids)][0])
        assert beyond == want[tuple(ids)][1]
    assert set(rows["beyond_prior"]) == {True, False}
    left = rows[rows["unique_by_text"] & rows["beyond_prior"]]
    assert report.unique_beyond_prior == len(left) > 0
    assert report.leaks_beyond_prior == left["leak"].nunique() <= report.leaks
    assert report.people_beyond_prior == left["owner"].nunique() <= report.people_affected
    assert report.failed("unique_beyond_prior>0")


def test_the_public_models_own_unique_count_stands_beside(tmp_path):
    tokenizer = word_tokenizer()
    saved_model(tmp_path / "m", tokenizer, seed=1)
    saved_model(tmp_path / "p", tokenizer, seed=2)
    report = tightlip.audit(tmp_path / "m", DOCUMENTS, public_model=tmp_path / "p", top_k=13)
    alone = tightlip.audit(tmp_path / "p", DOCUMENTS, top_k=13)
    assert report.public_unique == alone.unique > 0


def test_a_model_is_its_own_public_model_with_ratios_of_one(tmp_path):
    tokenizer = byte_tokenizer()
    saved_model(tmp_path / "m", tokenizer, seed=3)
    report = tightlip.audit(tmp_path / "m", DOCUMENTS, public_model=tmp_path / "m", top_k=90)
    assert report.sequences.num_rows > 3
    assert set(report.sequences["ratio"].to_pylist()) == {1.0}
    assert report.leakage_epsilon == 1.0
    assert report.public_unique == report.unique
    assert report.unique_by_text > report.unique_beyond_prior == report.leaks_beyond_prior == 0
    assert not report.failed("unique_beyond_prior>0")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("audited_kind", ["words", "bpe"])
def test_with_another_tokenizer_ratios_go_by_characters(tmp_path, audited_kind, seed):
    kinds = {"words": word_tokenizer(), "bpe": byte_tokenizer()}
    tokenizer = kinds.pop(audited_kind)
    (public_tokenizer,) = kinds.values()
    model = saved_model(tmp_path / "m", tokenizer, seed=seed)
    public = saved_model(tmp_path / "p", public_tokenizer, seed=seed + 50)
    report = tightlip.audit(
        tmp_path / "m",
        DOCUMENTS,
        public_model=tmp_path / "p",
        top_k=a_third(tokenizer),
        occurrences=None,
        thresholds=(1.0, 100.0),
    )
    want = expected(model, tokenizer, public, public_tokenizer, by_character, a_third(tokenizer))
    check(report, want, (1.0, 100.0))
    assert report.cross_tokenizer is True
    rows = report.sequences.to_pylist()
    assert rows == in_report_order(rows)


def test_a_run_in_which_no_public_token_starts_has_no_ratio_and_stands_last(tmp_path):
    # Bytes against words: a run inside a word belongs to a public token that started before it.
    tokenizer, public_tokenizer = byte_tokenizer(265), word_tokenizer()
    saved_model(tmp_path / "m", tokenizer, seed=4)
    saved_model(tmp_path / "p", public_tokenizer, seed=5)
    report = tightlip.audit(
        tmp_path / "m", DOCUMENTS, public_model=tmp_path / "p", top_k=90, occurrences=None
    )
    rows = report.sequences.to_pylist()
    ratios = [row["ratio"] for row in rows]
    assert None in ratios
    assert ratios[0] is not None
    known = len(ratios) - ratios.count(None)
    assert None not in ratios[:known]
    for row in rows[known:]:
        assert set(row["public_perplexities"]) == {None}


def test_the_first_token_without_a_begin_token_has_no_public_perplexity(tmp_path):
    tokenizer, public_tokenizer = word_tokenizer(), byte_tokenizer()
    model = saved_model(tmp_path / "m", tokenizer, seed=6)
    public_tokenizer.bos_token = None
    public = saved_model(tmp_path / "p", public_tokenizer, seed=7)
    report = tightlip.audit(
        tmp_path / "m", DOCUMENTS, public_model=tmp_path / "p", top_k=13, occurrences=None,
        thresholds=(2.0,),
    )  # fmt: skip
    want = expected(model, tokenizer, public, public_tokenizer, by_character, 13)
    assert any(None in [public for _, public in one["pairs"]] for one in want.values())
    check(report, want, (2.0,))


def test_nothing_unique_means_a_leakage_epsilon_of_zero(tmp_path):
    documents = [("ann", "go there"), ("bob", "go there")]
    tokenizer = build_tokenizer(open_corpus(documents), size=20)
    saved_model(tmp_path / "m", tokenizer, seed=1)
    report = tightlip.audit(
        tmp_path / "m", documents, public_model=tmp_path / "m", top_k=len(tokenizer)
    )
    assert (report.unique, report.leakage_epsilon, report.sequences.num_rows) == (0, 0.0, 1)


def test_without_a_public_model_nothing_is_said_of_ratios():
    tokenizer = word_tokenizer()
    report = tightlip.audit(BigramTable(len(tokenizer), 1), DOCUMENTS, tokenizer=tokenizer, top_k=5)
    assert report.sequences["ratio"].null_count == report.sequences.num_rows > 0
    assert report.sequences["public_perplexities"].null_count == report.sequences.num_rows
    for name in ("curated", "leakage_epsilon", "public_unique", "cross_tokenizer"):
        assert report.summary[name] is None
    assert report.sequences["prior"].null_count == report.sequences.num_rows
    assert report.unique_beyond_prior is None
    assert report.failed("unique_beyond_prior>0")


class Letters:
    """A tokenizer written in Python, one token per letter: it knows no offsets."""

    is_fast = False
    bos_token_id, unk_token_id, pad_token_id = 2, 1, 0
    all_special_ids = (0, 1, 2)
    split_special_tokens = False

    def __call__(self, texts, **options):
        return {"input_ids": [[3 + ord(letter) % 60 for letter in text] for text in texts]}

    def __len__(self):
        return 63

    def get_vocab(self):
        return {"a": 97}

    def convert_ids_to_tokens(self, ids):
        return [chr(number) for number in ids]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_a_slow_tokenizer_beside_another_one_is_refused(tmp_path):
    saved_model(tmp_path / "p", word_tokenizer(), seed=1)
    model = BigramTable(63, 1)
    alone = tightlip.audit(model, DOCUMENTS, tokenizer=Letters(), top_k=9)
    assert alone.sequences.num_rows > 0
    with pytest.raises(UsageError, match="Letters is not a fast tokenizer"):
        tightlip.audit(model, DOCUMENTS, tokenizer=Letters(), public_model=tmp_path / "p")


def test_each_users_largest_ratio_is_that_of_a_sequence_they_own(tmp_path):
    tokenizer = word_tokenizer()
    saved_model(tmp_path / "m", tokenizer, seed=8)
    saved_model(tmp_path / "p", tokenizer, seed=9)
    report = tightlip.audit(tmp_path / "m", DOCUMENTS, public_model=tmp_path / "p", top_k=13)
    rows = report.to_pandas()
    for user in report.users.to_pylist():
        own = rows[rows["owner"] == user["user"]]
        assert user["unique"] == len(own)
        assert user["longest"] == own["num_tokens"].max() if len(own) else user["longest"] == 0
        want = own["ratio"].max() if len(own) else None
        assert user["max_ratio"] == (None if want is None else pytest.approx(want))
    assert sum(user["unique"] for user in report.users.to_pylist()) == report.unique


def test_the_order_of_the_documents_does_not_change_a_ratio(tmp_path):
    tokenizer = word_tokenizer()
    saved_model(tmp_path / "m", tokenizer, seed=10)
    saved_model(tmp_path / "p", byte_tokenizer(), seed=11)
    shuffled = random.Random(0).sample(DOCUMENTS, len(DOCUMENTS))
    ratios = [
        dict(
            zip(
                map(tuple, report.sequences["token_ids"].to_pylist()),
                report.sequences["ratio"].to_pylist(),
                strict=True,
            )
        )
        for report in (
            tightlip.audit(tmp_path / "m", documents, public_model=tmp_path / "p", top_k=13)
            for documents in (DOCUMENTS, shuffled)
        )
    ]
    assert ratios[0].keys() == ratios[1].keys()
    for ids, ratio in ratios[0].items():
        assert ratios[1][ids] == pytest.approx(ratio, rel=1e-4)
    assert np.isfinite([r for r in ratios[0].values() if r is not None]).all()
