"""--fail-on: what fails, what passes, and what is refused before any work."""

import operator

import pytest

import tightlip
from standins import BigramTable
from tightlip.audit.leakage.summary import known_figures
from tightlip.core.errors import UsageError
from tightlip.core.gates import failures, parsed_condition
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer

SUMMARY = {
    "unique": 3,
    "unique_by_length": {"1": 2, "12": 1},
    "curated": {"1.5": 2, "2": 1, "10": 0},
    "leakage_epsilon": 4.25,
    "perplexity": 31.5,
    "validation_perplexity": None,
    "public_unique": 0,
}
KNOWN = known_figures()
SIGNS = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("limit", ["2", "3", "4", "3.0", "2.999", "-1", "3e0", "3e+0", "30e-1"])
def test_a_gate_fails_exactly_when_its_comparison_holds(sign, limit):
    failed = failures(SUMMARY, [f"unique{sign}{limit}"], KNOWN)
    assert bool(failed) == SIGNS[sign](3, float(limit))


def test_the_message_names_the_condition_and_the_figure():
    assert failures(SUMMARY, ["unique>0", "leakage_epsilon > 2"], KNOWN) == [
        "unique>0: unique is 3",
        "leakage_epsilon > 2: leakage_epsilon is 4.25",
    ]


def test_only_those_that_hold_are_reported():
    assert failures(SUMMARY, ["unique>5", "public_unique>0"], KNOWN) == []
    assert failures(SUMMARY, ["unique>5", "perplexity<40"], KNOWN) == [
        "perplexity<40: perplexity is 31.5"
    ]
    assert failures(SUMMARY, [], KNOWN) == []


@pytest.mark.parametrize("sign", SIGNS)
def test_a_figure_that_is_not_known_fails_whatever_is_asked(sign):
    (line,) = failures(SUMMARY, [f"validation_perplexity{sign}10"], KNOWN)
    assert line.endswith("validation_perplexity is not known")


def test_a_table_that_is_not_known_fails():
    summary = SUMMARY | {"curated": None}
    assert failures(summary, ["curated[2]>100"], KNOWN) == [
        "curated[2]>100: curated[2] is not known"
    ]


@pytest.mark.parametrize(
    ("condition", "fails"),
    [
        ("curated[2]>0", True),
        ("curated[2.0]>0", True),
        ("curated[1.5]>2", False),
        ("curated[10]>0", False),
        ("unique_by_length[12]>=1", True),
        ("unique_by_length[12]>1", False),
        ("unique_by_length[5]>0", False),  # nothing of five tokens: a known zero
        ("unique_by_length[5]<1", True),
        (" curated[2] > 0 ", True),
    ],
)
def test_entries_of_tables_are_figures_too(condition, fails):
    assert bool(failures(SUMMARY, [condition], KNOWN)) == fails


@pytest.mark.parametrize(
    "condition",
    [
        "unique", "unique>", ">0", "unique=0", "unique=>0", "unique>zero", "unique>nan",
        "unique>inf", "unique>1.2.3", "unique>.", "unique > 0 or p > 1", "unique>0;p>1", "", "0<unique",
        "UNIQUE>0", "curated[2>0", "curated[]>0", "curated[two]>0",
    ],
)  # fmt: skip
def test_what_is_no_comparison_with_a_number_is_refused(condition):
    with pytest.raises(UsageError, match="fail_on="):
        parsed_condition(condition, KNOWN)


@pytest.mark.parametrize(
    ("condition", "hint"),
    [
        ("uniqe>0", "Closest: unique"),
        ("leakage_epsilion>2", "Closest: leakage_epsilon"),
        ("model>0", "Available: accuracy, "),
        ("redacted>0", "Available: accuracy, "),
        ("curated>0", r"curated\[1.5\]"),
        ("curated[7]>0", "counted at 1.5, 2, 3, 5, 10 only"),
        ("unique_by_length>0", "not one number"),
        ("unique[2]>0", r"Leave \[2\] out"),
    ],
)
def test_a_figure_no_report_has_is_refused_before_there_is_a_report(condition, hint):
    with pytest.raises(UsageError, match=hint):
        parsed_condition(condition, KNOWN)


def test_every_number_of_a_report_can_be_asked_for():
    documents = [("ann", "a b c a b"), ("bob", "a b d")]
    tokenizer = build_tokenizer(open_corpus(documents), size=20)
    model = BigramTable(len(tokenizer), 1)
    report = tightlip.audit(model, documents, tokenizer=tokenizer, validation=documents, top_k=3)
    summary = report.summary
    numbers = {
        name
        for name, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    not_known_here = {"leakage_epsilon", "leakage_epsilon_sequence", "public_unique"}
    not_known_here |= {"not_trained_on", "trained_perplexity"}
    not_known_here |= {f"{name}_beyond_prior" for name in ("leaks", "people", "unique")}
    not_known_here |= {f"leaks_{name}" for name in ("short", "start", "template", "other")}
    not_known_here |= {"short_prefix"}
    tables = {name for name, kind in KNOWN.items() if kind is not None}
    assert (numbers - {"begin"}) | not_known_here == set(KNOWN) - tables
    assert tables <= summary.keys()
    for name in numbers - {"begin"}:
        assert failures(summary, [f"{name}=={summary[name]!r}"], KNOWN)


def test_a_gate_may_ask_for_a_role():
    chats = {"unique_by_role": {"user": 3}}
    gates = ["unique_by_role[user]>2", "unique_by_role[assistant]>0"]
    assert failures(chats, gates, KNOWN) == ["unique_by_role[user]>2: unique_by_role[user] is 3"]
    (told,) = failures({"unique_by_role": None}, gates[:1], KNOWN)
    assert "is not known" in told
