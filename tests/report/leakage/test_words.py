"""The sentences and numbers the page and the terminal share."""

import io
import math

from rich.console import Console

from report.leakage.folders import sample_rows, sample_snapshots, summary_of, users_of
from tightlip.core.figures import guarantee_words, number, percent
from tightlip.report.leakage.words import snapshots_table, summary_lines, terminal_table, verdict

LEDGER = {
    "mechanism": "DP-SGD", "epsilon": 4.68, "delta": 1e-5, "unit": "user", "adjacency": "add or remove one user",
    "sampling": "Poisson", "accountant": "PLD", "steps": 20000, "standing": "proved", "because": "",
    "covers": ["weights"], "outside": ["the public tokenizer"],
}  # fmt: skip


def a_summary(**changed):
    rows = sample_rows(120)
    return summary_of(rows, users_of(rows), **changed)


def printed(table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_no_epsilon_without_standing():
    for standing in ("proved", "as published"):
        words = guarantee_words({**LEDGER, "standing": standing})
        assert "ε = 4.68" in words.value
        assert standing in words.value
    for guarantee in (
        None,
        {**LEDGER, "standing": "measured only"},
        {**LEDGER, "standing": "hoped"},
    ):
        words = guarantee_words(guarantee)
        assert "ε" not in f"{words}"
        assert "4.68" not in f"{words}"


def test_unknown_is_plain():
    assert guarantee_words(None).sentence.startswith("No guarantee: ")
    words = guarantee_words(
        {**LEDGER, "standing": "measured only", "because": "adversarial training proves nothing"}
    )
    assert words.sentence == "No guarantee: measured only. Adversarial training proves nothing."


def test_the_verdict_counts_people_and_says_what_is_copied():
    sentence, weighing = verdict(
        a_summary(unique=2138, users_with_unique=3, num_users=12), num_copied=1
    )
    assert sentence == "This model completes 2,138 pieces of text that only one person wrote."
    assert "3 of 12 people (25.0%)" in weighing[0]
    assert any("copied" in part for part in weighing)


def test_the_verdict_never_calls_an_empty_report_safe():
    none_unique, _ = verdict(a_summary(unique=0))
    nothing, _ = verdict(a_summary(unique=0, distinct_sequences=0))
    assert none_unique.startswith("None found")
    assert "nothing" in nothing
    assert not any("safe" in text for text in (none_unique, nothing))


def test_unmeasured_figures_say_how_to_measure_them():
    summary = a_summary(
        validation_perplexity=None, leakage_epsilon=None, public_model=None, curated=None
    )
    by_name = {line.name: line for line in summary_lines(summary)}
    assert by_name["Validation perplexity"].value == "not known"
    assert "--validation" in by_name["Validation perplexity"].sentence
    assert "--public-model" in by_name["Leakage epsilon"].sentence


def test_every_line_has_a_name_a_value_and_a_sentence():
    every_null = dict.fromkeys(a_summary())
    for summary in (a_summary(), every_null, {}):
        for line in summary_lines(summary):
            assert len(line) == 3
            assert all(line)
            assert line.sentence.endswith(".")


def test_the_terminal_prints_the_same_words_as_the_page():
    summary = a_summary(guarantee=LEDGER)
    shown = " ".join(printed(terminal_table(summary)).split())
    for line in summary_lines(summary):
        assert line.name in shown
        assert line.sentence.split(".")[0][:40] in shown


def test_markup_in_a_name_is_not_obeyed_by_the_terminal():
    assert "[bold]news[/bold]" in printed(
        terminal_table(a_summary(guarantee={**LEDGER, "because": "[bold]news[/bold]"}))
    )


def test_the_snapshot_table_marks_the_best_validation_perplexity():
    snapshots = sample_snapshots(6)
    shown = printed(snapshots_table(snapshots)).splitlines()
    best = min(range(6), key=lambda i: snapshots["snapshots"][i]["validation_perplexity"])
    assert [i for i, line in enumerate(shown[1:]) if "best" in line] == [best]
    assert shown[0].split() == [
        "epoch",
        "train",
        "ppl",
        "validation",
        "ppl",
        "unique",
        "longest",
        "unique",
        "ε_l",
    ]


def test_a_snapshot_table_without_validation_marks_nothing():
    shown = printed(snapshots_table(sample_snapshots(3, validation=False)))
    assert "best" not in shown
    assert "validation" not in shown
    assert "not known" not in shown


def test_odd_numbers_have_words():
    assert number(math.nan) == "not a number"
    assert number(math.inf) == "∞"
    assert percent(0.99999) == "over 99.9%"
