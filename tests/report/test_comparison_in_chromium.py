"""The comparison's page in a real browser: quiet, readable, and no wider than the screen."""

import pytest

from report.runs import exposures, measured, membership, with_perplexity
from report.test_in_chromium import browser, contrast, opened  # noqa: F401 (fixtures)
from tightlip.audit.compared import Matching, compared
from tightlip.report.comparison import render_comparison


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    hidden = membership(0.6) | {"not_counted": {"num_documents": 233, "num_tokens": 4800}}
    runs = [
        measured("plain"),
        with_perplexity("adversarial", 151, exposures=exposures([1, 5, 2, 6])),
        with_perplexity("triplet", 149, exposures=exposures([1, 5.1, 2, 6.1]), membership=hidden),
        with_perplexity("a-run-with-a-very-long-name-indeed/of-its-own", 700),
        with_perplexity("dp", 152, tokenizer="bpe"),
    ]
    matching = Matching()
    page = render_comparison(compared(runs, matching), matching, notes=["110 users are few."])
    path = tmp_path_factory.mktemp("page") / "comparison.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_screen(opened, path, width):  # noqa: F811
    page = opened(path, width=width, java_script_enabled=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_needs_no_script(opened, path):  # noqa: F811
    page = opened(path, java_script_enabled=False)
    assert page.locator("h1").inner_text() == (
        "At matched utility, no run clearly gives away less than plain."
    )
    assert page.locator("svg").count() == 2 + 5
    assert page.locator("#table tbody tr").count() > 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_ground(opened, path, scheme):  # noqa: F811
    page = opened(path, color_scheme=scheme)
    colours = page.evaluate("""() => ['body', '.compared small', '.compared .section th', '.verdicts li']
        .map(name => document.querySelector(name))
        .map(n => [getComputedStyle(n).color, getComputedStyle(document.body).backgroundColor])""")
    for ink, ground in colours:
        assert contrast(ink, ground) > 4.5


def test_no_name_lies_on_another_name_or_on_a_mark(opened, path):  # noqa: F811
    page = opened(path)
    plots = page.evaluate("""() => [...document.querySelectorAll('svg')].map(svg =>
        ['.run-name', '.run'].map(kind => [...svg.querySelectorAll(kind)]
            .map(n => n.getBoundingClientRect()).map(r => [r.left, r.right, r.top, r.bottom])))""")
    assert sum(len(names) for names, _ in plots) == 2 * 4
    for names, marks in plots:
        for place, name in enumerate(names):
            for other in [*names[place + 1 :], *marks]:
                assert not overlap(name, other), (name, other)


def overlap(first, second, blank=3):
    """Whether two boxes share ink: above and below its letters, a line's box is blank."""
    across = first[0] < second[1] and second[0] < first[1]
    return across and first[2] + blank < second[3] and second[2] + blank < first[3]


def test_measures_stay_in_sight_while_runs_scroll_by(opened, path):  # noqa: F811
    page = opened(path, width=390)
    page.locator(".compared").first.evaluate("node => { node.scrollLeft = 200; }")
    name = page.locator("#table tbody th[scope=row]").first.bounding_box()
    assert 0 <= name["x"] < 40
