"""The comparison's page in a real browser, beyond what holds for every page."""

import pytest

from report.samples import comparison
from tightlip.report.kit import write_page


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return write_page("comparison", folder / "comparison.html", **comparison(folder))


def test_the_page_needs_no_script(opened, path):
    page = opened(path, java_script_enabled=False)
    assert page.locator("h1").inner_text() == (
        "At matched utility, no model clearly gives away less than plain."
    )
    assert page.locator("svg").count() == 2 + 5
    assert page.locator("#table tbody tr").count() > 10


def test_no_name_lies_on_another_name_or_on_a_mark(opened, path):
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


def test_measures_stay_in_sight_while_runs_scroll_by(opened, path):
    page = opened(path, width=390)
    page.locator(".compared").first.evaluate("node => { node.scrollLeft = 200; }")
    name = page.locator("#table tbody th[scope=row]").first.bounding_box()
    assert 0 <= name["x"] < 40
