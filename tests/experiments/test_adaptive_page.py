"""The page of `tightlip reproduce adaptive`, from made-up figures: what it says, and in a browser."""

import copy
import io
import re

import pytest
from rich.console import Console

from report.test_in_chromium import browser, contrast, opened  # noqa: F401 (fixtures)
from tightlip.experiments.adaptive_page import render_adaptive, terminal_tables
from tightlip.experiments.adaptive_tables import (
    PAPER,
    csv_text,
    find,
    findings,
    groups,
    headline,
    result_of,
    stopped_early,
)

THIRDS = ("ordinary", "middling", "rare")
PERPLEXITY = {"none": 120.0, "dp": 500.0, "clip": 550.0, "scale": 700.0, "as-published": 450.0}


def row(mode, sigma=None, kind="same noise"):
    """A run whose losses are level over thirds but for rare text, which pays 0.1 nats more."""
    private = mode != "none"
    return {
        "run": f"{mode}-{sigma}-{kind}",
        "mode": mode,
        "kind": kind if private else "no noise",
        "sigma": sigma,
        "noise_multiplier": sigma,
        "epsilon": 2.0 / sigma if private else None,
        "delta": 1e-5 if private else None,
        "unit": "example" if private else None,
        "standing": "as published" if mode == "as-published" else "proved" if private else "measured only",
        "because": "Because.",
        "accountant": "PLD",
        "steps": 40,
        "planned_steps": 40,
        "stop": "steps",
        "last_noise_multiplier": None,
        "loss_nats": 6.0,
        "perplexity": PERPLEXITY[mode],
        "exposure": [{"repetitions": n, "bits": b} for n, b in ((10, 1.0), (100, 3.0), (1000, 19.9))],
        "thirds": [
            {"third": name, "mean_rho": rho, "num_documents": 90, "loss_nats": 5 + private + cost, "seen_loss_nats": 5.0, "kept_nats": 0.1}
            for name, rho, cost in zip(THIRDS, (0.2, 0.5, 0.9), (0, 0, 0.1 * (mode == "clip")), strict=True)
        ],
        "exposure_by_third": [
            {"third": name, "mean_rho": 0.5, "num_canaries": 12, "mean_bits": 2.0} for name in THIRDS
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def result():
    rows = [row("none")]
    rows += [row(mode, s) for s in (1.0, 5.0) for mode in ("dp", "clip", "scale", "as-published")]
    rows += [
        row(mode, s, "equal epsilon") for s in (1.0, 5.0) for mode in ("scale", "as-published")
    ]
    about = {"unit": "example", "num_documents": 4000, "num_users": 170, "num_units": 4000}
    section = {
        "name": "plays",
        **about,
        "mean_weight": 0.7,
        "mean_minmax_weight": 0.3,
        "rows": rows,
    }
    facts = {"scale": "smoke", "public_model": "an LSTM", "public_corpus": "others", "version": "0"}
    facts |= {"machine": "torch on the CPU"}
    return result_of([section], **facts)


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
    said = " ".join(findings(result["corpora"][0]))
    assert "ordinary +0.000, middling +0.000, rare +0.100" in said
    assert "clip has 1.10 times that, scale has 1.40 times that" in said
    assert "No theorem covers it." in said


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
    said = stopped_early(section)[0]
    assert said.startswith("scale at the ε of DP at σ 1 stopped after 6 of 40 steps")
    assert "passed ε 2.00" in said
    assert "64% of σ" in said
    assert "scale has 1.40 times that (it stopped after 6 of 40 steps)" in " ".join(findings(section))  # fmt: skip


def test_it_is_marked_on_the_page_and_in_the_terminal(cut_short):
    page = render_adaptive(cut_short)
    assert page.count("6 of 40<small>budget spent</small>") == 1
    assert "Stopped early" in page
    console = Console(width=80, record=True, file=io.StringIO())
    for table in terminal_tables(cut_short):
        console.print(table)
    assert console.export_text().count("scale †") == 2  # one of four in each of two tables


def test_runs_that_took_every_step_are_not_marked(result):
    assert stopped_early(result["corpora"][0]) == []
    assert "Stopped early" not in render_adaptive(result)


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
    said = console.export_text()
    assert "…" not in said
    assert "as published" in said
    for each in PAPER:
        assert f"{each['perplexity']:,.2f}" in said


def test_no_script_and_no_address_is_on_the_page(result):
    assert not re.search(r"<script|https?:", render_adaptive(result))


@pytest.fixture(scope="module")
def path(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "adaptive.html"
    path.write_text(render_adaptive(result), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_screen(opened, path, width):  # noqa: F811
    page = opened(path, width=width, java_script_enabled=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_ground(opened, path, scheme):  # noqa: F811
    page = opened(path, color_scheme=scheme)
    colours = page.evaluate("""() => ['.runs small', '.runs .unproved', '.runs .section th', '.legend']
        .map(name => document.querySelector(name))
        .map(n => [getComputedStyle(n).color, getComputedStyle(document.body).backgroundColor])""")
    for ink, ground in colours:
        assert contrast(ink, ground) > 4.5
