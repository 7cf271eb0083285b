"""The page of privacy weights: what it says, and that it keeps to itself."""

import math
import re

import numpy as np
import pytest

from report.samples import INFO, NATS, RHO, weighed
from tightlip.report.kit import render_page, write_page
from tightlip.report.weights import MOST_CHARACTERS, lines_about, spread_of

ESTIMATES = "These weights estimate how rare a text is, not how private it is"
IS_NOT_SOUND = "Every weight depends on every document of the corpus, so no proof covers them"


def shown(**changed):
    ends = (weighed(), weighed(3))
    return {"info": INFO | changed, "rho": RHO, "nats": NATS, "public": np.arange(120.0), "shown": ends}  # fmt: skip


def page_of(**changed):
    return render_page("weights", **shown(**changed))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_page("weights", tmp_path_factory.mktemp("page") / "weights.html", **shown())


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
    assert (spread["num_documents"], spread["num_unscored"], spread["median"]) == (4, 1, 0.4)
    assert spread["at_one"] == spread["at_least"] == pytest.approx(1 / 3)


def test_weights_that_tell_nothing_apart_are_doubted():
    lines = lines_about(INFO, np.ones(10), np.full(10, 9.0))
    assert any("tell little apart" in line for line in lines)
    nothing = {"rho": np.ones(2), "nats": np.full(2, math.nan), "public": None, "shown": ([], [])}
    assert "No document could be scored." in render_page("weights", info=INFO, **nothing)


def test_a_strange_text_is_shown_and_not_obeyed(opened, path):
    page = opened(path)
    assert page.title() == "Privacy weights"
    assert page.locator("#highest tbody tr").count() == 20
