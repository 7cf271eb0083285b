"""The page in a real browser: it opens quietly, sorts, filters and shows what was asked for."""

import math

import pytest

from report.leakage.folders import (
    PEOPLE,
    redacted,
    row,
    sample_rows,
    sample_snapshots,
    write_folder,
)
from report.samples import contrast
from tightlip.report.kit import write_page

NASTY = row(
    sequence="</script><img src=x onerror=\"document.title='owned'\"> \u202eevil\x00 שלום 😀\nnew line",
    num_tokens=12, ratio=9e5, contexts=["<b>bold</b> &amp; مرحبا"], perplexities=[math.inf], public_perplexities=[math.nan],
    owner="<i>O'Brien</i> & \u202e sons " * 400,
)  # fmt: skip
ROWS = [NASTY, *sample_rows(220, seed=7)]


def page_of(folder):
    return write_page("leakage", folder / "report.html", folder=folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "r"
    people = [*PEOPLE, NASTY["owner"]]
    return page_of(write_folder(folder, ROWS, people=people, snapshots=sample_snapshots(5)))


def show_all(page, more="#more"):
    while page.locator(more).is_visible():
        page.locator(more).click()


def column(page, place, table="#sequence-table"):
    """The texts of one column, all rows."""
    return page.locator(f"{table} tbody tr.row td:nth-child({place})").all_inner_texts()


def as_number(text):
    return (
        {"–": None, "∞": math.inf, "not a number": None}.get(text)
        if text in ("–", "∞", "not a number")
        else float(text.replace(",", ""))
    )


UNIQUE = [r for r in ROWS if r["users_in_d"] == 1]


def test_the_page_opens_without_a_word_and_without_the_network(opened, path):
    page = opened(path)
    assert (
        page.locator("h1")
        .inner_text()
        .startswith(f"This model completes {len(UNIQUE)} pieces of text")
    )
    assert page.title() == "Leakage report"
    assert page.locator("img").count() == 0


KEYS = {
    "tokens": (2, lambda r: r["num_tokens"]),
    "perplexity": (4, lambda r: r["perplexities"][0]),
    "completed": (5, lambda r: r["total_in_s"]),
    "written": (6, lambda r: r["total_in_d"]),
}


@pytest.mark.parametrize("key", KEYS)
def test_sorting_agrees_with_python(opened, path, key):
    place, of = KEYS[key]
    page = opened(path)
    head = page.locator(f"#sequence-table th[data-key={key}]")
    for direction, sign in (("descending", -1), ("ascending", 1)):
        head.locator("button").click()
        show_all(page)
        assert head.get_attribute("aria-sort") == direction
        # Python's sort is stable too, so ties must come in the report's own order.
        expected = sorted(UNIQUE, key=lambda r: sign * of(r))
        assert [as_number(text) for text in column(page, place)] == pytest.approx(
            [of(r) for r in expected], rel=6e-3, abs=6e-3
        )
        assert [as_number(text) for text in column(page, 3)] == pytest.approx(
            [r["ratio"] for r in expected], rel=6e-3, abs=6e-3
        )


def test_the_report_opens_in_its_own_order(opened, path):
    page = opened(path)
    assert (
        page.locator("#sequence-table th[data-key=ratio]").get_attribute("aria-sort")
        == "descending"
    )
    show_all(page)
    assert [as_number(text) for text in column(page, 2)] == [r["num_tokens"] for r in UNIQUE]


def test_owners_sort_by_name_and_nobody_comes_last(opened, path):
    page = opened(path)
    page.locator("#only-unique").uncheck()
    page.locator("#sequence-table th[data-key=owner] button").click()
    show_all(page)
    names = [text.strip() for text in column(page, 8)][
        1:
    ]  # the odd one first: "<" sorts before letters
    expected = sorted(r["owner"] for r in UNIQUE if r is not NASTY)
    assert names == expected + [""] * (len(ROWS) - len(UNIQUE))


def count_after(page, do):
    do(page)
    show_all(page)
    return page.locator("#sequence-table tbody tr.row").count()


FILTERS = [
    (lambda p: p.locator("#search").fill("SUMMER"), lambda r: "summer" in r["sequence"].lower()),
    (lambda p: p.locator("#min-tokens").fill("6"), lambda r: r["num_tokens"] >= 6),
    (lambda p: p.locator("#min-ratio").fill("4.5"), lambda r: r["ratio"] >= 4.5),
    (lambda p: p.locator("#hide-copied").check(), lambda r: not r["copied"]),
    (lambda p: p.locator("#owner").select_option(label="Orsino"), lambda r: r["owner"] == "Orsino"),
]


@pytest.mark.parametrize(("do", "keeps"), FILTERS)
def test_filters_filter(opened, path, do, keeps):
    page = opened(path)
    assert count_after(page, do) == sum(map(keeps, UNIQUE)) > 0
    page.locator("#filters button[type=reset]").click()
    page.wait_for_timeout(50)
    assert count_after(page, lambda p: None) == len(UNIQUE)


def test_shared_sequences_appear_when_asked_for(opened, path):
    assert count_after(opened(path), lambda p: p.locator("#only-unique").uncheck()) == len(ROWS)


def test_a_search_that_finds_nothing_says_so(opened, path):
    page = opened(path)
    page.locator("#search").fill("no such words anywhere")
    assert page.locator("#status").inner_text() == "No row on this page matches."


def test_opening_a_row_shows_its_contexts_with_the_run_highlighted(opened, path):
    page = opened(path)
    place, sequence = next(
        (i, r) for i, r in enumerate(UNIQUE[:25]) if r["total_in_s"] > 1 and r["contexts"][0]
    )
    button = page.locator("#sequence-table tbody tr.row button").nth(place)
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    shown = page.locator("#sequence-table tr.detail .context")
    assert shown.count() == len(sequence["contexts"])
    for occurrence, context in enumerate(sequence["contexts"]):
        assert shown.nth(occurrence).locator("mark").inner_text() == sequence["sequence"]
        assert shown.nth(occurrence).inner_text() == context + sequence["sequence"]
    about = page.locator("#sequence-table tr.detail .context + .about").first.inner_text()
    assert f"perplexity {sequence['perplexities'][0]:.2f}" in about
    assert "public model" in about
    page.keyboard.press("Enter")
    assert page.locator("tr.detail").count() == 0


def test_a_strange_text_is_shown_and_not_obeyed(opened, path):
    page = opened(path)
    page.locator("#sequence-table tbody tr.row button").first.click()
    marked = page.locator("#sequence-table tr.detail mark").inner_text()
    assert marked.startswith("</script><img src=x onerror=")
    assert "[U+202E]evil[U+0000]" in marked
    assert "<b>bold</b> &amp;" in page.locator("#sequence-table tr.detail .context").inner_text()
    assert page.title() == "Leakage report"


def test_choosing_a_person_shows_their_sequences(opened, path):
    page = opened(path)
    page.locator("#search").fill("mercy")
    page.locator("#user-table button", has_text="Viola").first.click()
    page.wait_for_timeout(50)
    show_all(page)
    assert set(column(page, 8)) == {"Viola"}
    assert len(column(page, 8)) == sum(r["owner"] == "Viola" for r in UNIQUE)


def test_the_user_table_sorts(opened, path):
    page = opened(path)
    page.locator("#user-table th[data-key=longest] button").click()
    longest = [as_number(text) for text in column(page, 5, "#user-table")]
    assert longest == sorted(longest, reverse=True)
    assert len(set(longest)) > 1


@pytest.mark.parametrize("width", [390, 1280])
def test_no_sideways_scrolling_and_no_jump_when_rows_open(opened, path, width):
    page = opened(path, width=width)
    for detail in page.locator("details summary").all():
        detail.click()
    where = """() => [...document.querySelectorAll('#sequence-table th, #sequence-table tbody tr:first-child td')]
        .map(n => n.getBoundingClientRect()).filter(r => r.width).map(r => [r.x, r.y + scrollY, r.width])"""
    before = page.evaluate(where)
    page.locator("#sequence-table tbody tr.row button").first.click()
    page.locator("#sequence-table tbody tr.row button").nth(2).click()
    assert page.evaluate(where) == before
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_redacted_page_shows_lengths_in_place_of_words(opened, tmp_path):
    rows = redacted(sample_rows(80, seed=3))
    names = sorted({r["owner"] for r in rows if r["owner"]})
    page = opened(page_of(write_folder(tmp_path / "r", rows, people=names, redacted=True)))
    first = next(r for r in rows if r["users_in_d"] == 1)
    page.locator("#sequence-table tbody tr.row button").first.click()
    length = f"{first['num_tokens']} token" + ("s" if first["num_tokens"] > 1 else "")
    assert page.locator("#sequence-table tr.detail mark").first.inner_text() == length
    assert (
        page.locator("#sequence-table tr.detail .before")
        .first.inner_text()
        .startswith(f"context: {first['context_tokens'][0]} token")
    )
    shown = page.content()
    secrets = {
        word
        for r in sample_rows(80, seed=3)
        for word in [r["sequence"].strip(), *r["contexts"]]
        if len(word) > 12
    }
    assert secrets
    assert not any(secret in shown for secret in secrets)
    assert not any(name in shown for name in PEOPLE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_ground(opened, path, scheme):
    page = opened(path, color_scheme=scheme)
    colours = page.evaluate("""() => [document.body, document.querySelector('.card p'), document.querySelector('mark') || document.body]
        .map(n => [getComputedStyle(n).color, getComputedStyle(document.body).backgroundColor])""")
    for ink, ground in colours:
        assert contrast(ink, ground) > 4.5


@pytest.mark.parametrize(
    "rows",
    [[], [r for r in ROWS if r["users_in_d"] > 1][:20], sample_rows(40, public=False)],
    ids=["empty", "none unique", "no public model"],
)
def test_bare_reports_open_quietly(opened, tmp_path, rows):
    page = opened(page_of(write_folder(tmp_path / "r", rows)))
    assert page.locator("h1").is_visible()
    if rows:
        page.locator("#sequence-table tbody tr.row button").first.click()
        assert page.locator("tr.detail mark").first.is_visible()
