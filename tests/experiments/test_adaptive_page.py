"""The page of `tightlip reproduce adaptive`, from made-up figures: what it says."""

import copy
import io
import re

import pytest
from rich.console import Console

from experiments.made_up import adaptive_result
from tightlip.experiments.adaptive_page import terminal_tables
from tightlip.experiments.adaptive_tables import (
    PAPER,
    csv_text,
    find,
    findings,
    groups,
    headline,
    stopped_early,
)
from tightlip.report.kit import render_page


@pytest.fixture(scope="module")
def result():
    return adaptive_result()


def page_of(result):
    return render_page("adaptive-paper", result=result)


def test_equal_epsilon_repeats_plain_dp_and_clip_which_spend_the_same(result):
    names = [[each["run"] for each in rows] for _, _, rows in groups(result["corpora"][0])]
    assert [len(rows) for rows in names] == [1, 4, 4, 4, 4]
    assert names[3] == [
        "dp-1.0-same noise",
        "clip-1.0-same noise",
        "scale-1.0-equal epsilon",
        "as-published-1.0-equal epsilon",
    ]


def test_ratios_are_set_beside_the_papers(result):
    assert result["ratios"][0]["paper"] == pytest.approx(4426.05 / 7582.65)
    assert result["ratios"][0]["ours"] == {"plays": 450 / 500}


def test_the_headline_claims_no_gain_where_there_is_none(result):
    assert headline(result) == "At equal ε, the weights buy no perplexity."


def test_who_pays_is_said_in_words(result):
    words = " ".join(findings(result["corpora"][0]))
    assert "ordinary +0.000, middling +0.000, rare +0.100" in words
    assert "clip has 1.10 times that, scale has 1.40 times that" in words
    assert "No theorem covers it." in words


@pytest.fixture
def cut_short(result):
    """The same, but that the budget of `scale` at the ε of DP at σ 1 was spent after 6 steps."""
    changed = copy.deepcopy(result)
    chosen = find(changed["corpora"][0]["rows"], "scale", 1.0, "equal epsilon")
    chosen |= {"steps": 6, "stop": "privacy budget", "last_noise_multiplier": 0.64}
    return changed


def test_a_run_that_its_budget_ended_early_is_named_with_the_reason(cut_short):
    section = cut_short["corpora"][0]
    assert len(stopped_early(section)) == 1
    words = stopped_early(section)[0]
    assert words.startswith("scale at the ε of DP at σ 1 stopped after 6 of 40 steps")
    assert "passed ε 2.00" in words
    assert "64% of σ" in words
    assert "scale has 1.40 times that (it stopped after 6 of 40 steps)" in " ".join(findings(section))  # fmt: skip


def test_it_is_marked_on_the_page_and_in_the_terminal(cut_short):
    page = page_of(cut_short)
    assert page.count("6 of 40<small>budget spent</small>") == 1
    assert "Stopped early" in page
    console = Console(width=80, record=True, file=io.StringIO())
    for table in terminal_tables(cut_short):
        console.print(table)
    assert console.export_text().count("scale †") == 2  # one of four in each of two tables


def test_runs_that_took_every_step_are_not_marked(result):
    assert stopped_early(result["corpora"][0]) == []
    assert "Stopped early" not in page_of(result)


def test_every_run_is_a_line_of_the_csv(result):
    lines = csv_text(result).splitlines()
    assert len(lines) == 1 + 13
    assert lines[0].startswith(
        "corpus,run,mode,kind,sigma,noise_multiplier,epsilon,delta,unit,standing"
    )


def test_the_terminal_has_every_figure_in_eighty_columns(result):
    console = Console(width=80, record=True, file=io.StringIO())
    for table in terminal_tables(result):
        console.print(table)
    words = console.export_text()
    assert "…" not in words
    assert "as published" in words
    for each in PAPER:
        assert f"{each['perplexity']:,.2f}" in words


def test_no_script_and_no_address_is_on_the_page(result):
    assert not re.search(r"<script|https?:", page_of(result))
