"""The page of privacy weights: what it says, and that it keeps to itself."""

import math
import re

import numpy as np
import pytest

from report.test_in_chromium import browser, contrast, opened  # noqa: F401 (fixtures)
from tightlip.report.weights import (
    ESTIMATES,
    IS_NOT_SOUND,
    MOST_CHARACTERS,
    lines_about,
    render_weights,
    spread_of,
)

INFO = {
    "normalisation": "public",
    "is_sound": True,
    "estimator": "language model",
    "model": "some-model",
    "model_fingerprint": "f" * 64,
    "public_corpus": "public.parquet",
    "public_corpus_fingerprint": "e" * 64,
    "a": 3.0,
    "b": 6.0,
    "least_weight": 0.05,
    "text_fingerprint": "d" * 64,
    "version": "0.1.0",
}
NATS = np.append(np.random.default_rng(0).normal(4.5, 0.8, 499), math.nan)
RHO = np.where(np.isnan(NATS), 1.0, np.clip((NATS - 3) / 3, 0.05, 1))
NASTY = "</td><script>document.title='owned'</script> \u202eevil שלום " + "word " * 200


def shown(num=20):
    return [
        {"number": n, "user": f"<b>u{n}</b>", "text": NASTY, "rho": 1 - n / 100, "nats": 9.0}
        for n in range(num)
    ]


def page_of(**changed):
    return render_weights(INFO | changed, RHO, NATS, np.arange(120.0), (shown(), shown(3)))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "weights.html"
    path.write_text(page_of(), encoding="utf-8")
    return path


def test_the_page_says_what_it_is_and_is_not():
    page = page_of()
    for words in (ESTIMATES, "private text and names in this file", "as private as the text"):
        assert words in page
    assert "3.00 and 6.00 nats" in page
    assert "120 scored" in page


def test_unsound_weights_and_frequency_estimates_are_called_so():
    page = page_of(normalisation="minmax", is_sound=False)
    assert IS_NOT_SOUND in page
    assert "for as-published only" in page
    named = "frequency estimate, no language model"
    page = page_of(estimator="frequency estimate", model=named)
    assert page.count(named) >= 3
    assert "nats a word" in page


def test_texts_are_shortened_and_harmless():
    page = page_of()
    assert "<script>document" not in page
    assert "<b>u1</b>" not in page
    assert page.count("more characters") == 23
    assert "word " * (MOST_CHARACTERS // 5) not in page


def test_the_page_names_no_address():
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)|https?:""", page_of())


def test_the_bars_hold_every_scored_document():
    counts = [
        int(n.replace(",", "")) for n in re.findall(r": ([\d,]+) documents?</title>", page_of())
    ]
    assert sum(counts) == 2 * 499


def test_the_spread_is_over_scored_documents():
    spread = spread_of(np.array([0.05, 0.4, 1.0, 1.0]), np.array([1.0, 2, 3, math.nan]), 0.05)
    assert (spread.num_documents, spread.num_unscored, spread.median) == (4, 1, 0.4)
    assert spread.at_one == spread.at_least == pytest.approx(1 / 3)


def test_weights_that_tell_nothing_apart_are_doubted():
    lines = lines_about(INFO, np.ones(10), np.full(10, 9.0))
    assert any("tell little apart" in line for line in lines)
    assert render_weights(INFO, np.ones(2), np.full(2, math.nan), None, ([], []))


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_screen(opened, path, width):  # noqa: F811
    page = opened(path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.title() == "Privacy weights"
    assert page.locator("#highest tbody tr").count() == 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_ground(opened, path, scheme):  # noqa: F811
    page = opened(path, color_scheme=scheme)
    colours = page.evaluate("""() => ['body', '.weighed small', '.weighed .cut', '.what']
        .map(name => document.querySelector(name))
        .map(n => [getComputedStyle(n).color, getComputedStyle(document.body).backgroundColor])""")
    for ink, ground in colours:
        assert contrast(ink, ground) > 4.5
