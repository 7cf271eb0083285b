"""The page of `tightlip reproduce adaptive`, from made-up figures: what it says, and in a browser."""

import io
import re

import pytest
from rich.console import Console

from report.test_in_chromium import browser, contrast, opened  # noqa: F401 (fixtures)
from tightlip.report.adaptive import PAPER, csv_text, findings, groups, headline, result_of
from tightlip.report.adaptive_page import render_adaptive, terminal_tables

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
