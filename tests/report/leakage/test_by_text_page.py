"""The page of a report that counted words: leaks first, and each opens to its sequences."""

import json

import pytest

from report.leakage.folders import (
    PEOPLE,
    by_text,
    redacted,
    row,
    sample_snapshots,
    users_of,
    write_folder,
)
from tightlip.report.kit import render_page, write_page
from tightlip.report.leakage import read_users
from tightlip.report.leakage.tallies import tally_and_choose
from tightlip.report.leakage.words import summary_lines, verdict

PLAIN = [
    row(sequence=" <kind> regards", num_tokens=2, ratio=89_000.0, owner="Feste"),
    row(sequence=" account DE44 5001", num_tokens=9, ratio=40.0, perplexities=[1.5], owner="Viola"),
    row(sequence="DE44", num_tokens=4, ratio=60.0, perplexities=[1.1], owner="Viola"),
    row(sequence=" 33", num_tokens=1, ratio=30.0, owner="Viola"),
    row(sequence=" 5001 and more", num_tokens=5, ratio=20.0, owner="Viola"),
    row(sequence=" very much", users_in_d=3, ratio=2.0, owner=None),
]
LEAKS = {1: 1, 2: 1, 4: 1}  # row 3 others wrote too, as row 0 did
ROWS = by_text(PLAIN, LEAKS)
FIGURES = {
    "leaks": 1, "people_affected": 1, "unique_by_text": 3, "leakage_epsilon_sequence": 0,
    "ratio_quantiles": {"0.5": 40.0, "0.9": 89_000.0, "0.99": 89_000.0, "1": 89_000.0},
}  # fmt: skip


def folder_of(tmp_path, rows=ROWS, **changed):
    return write_folder(tmp_path / "r", rows, **{**FIGURES, **changed})


def test_the_headline_counts_leaks_and_the_people_whose_they_are(tmp_path):
    page = render_page("leakage", folder=folder_of(tmp_path))
    assert "This model completes 1 piece of text that only one person wrote." in page
    assert "It belongs to 1 of 14 people (7.1%); the longest is 9 tokens." in page
    assert "The model completes them in 3 sequences." in page
    assert (
        page.index(">Leaks<") < page.index(">People affected<") < page.index(">Unique by tokens<")
    )


def test_leakage_epsilon_is_shown_with_the_sequence_behind_it(tmp_path):
    folder = folder_of(tmp_path)
    page = render_page("leakage", folder=folder)
    assert (
        "“&lt;kind&gt; regards” (2 tokens, unique by tokens but not by text), row 0, counted from 0, of"
        in page
    )
    assert "40.0 (half)" in page
    assert "89,000 (all)" in page
    hidden = write_folder(tmp_path / "s", redacted(ROWS), **FIGURES, redacted=True)
    page = render_page("leakage", folder=hidden)
    assert (
        "It is that of 2 tokens, unique by tokens but not by text, row 0, counted from 0, of"
        in page
    )
    assert "regards" not in page


def test_nothing_unique_by_text_is_none_found_and_says_why(tmp_path):
    rows = by_text(PLAIN, {})
    page = render_page(
        "leakage", folder=folder_of(tmp_path, rows, leaks=0, unique_by_text=0, people_affected=0)
    )
    assert "None found" in page
    assert "By its tokens alone 5 sequences are one person" in page
    assert 'id="none-found"' in page


def test_the_tally_and_the_rows_go_by_text_and_a_leaks_name_comes_along(tmp_path):
    tally, chosen = tally_and_choose(folder_of(tmp_path), [])
    assert (tally.num_unique, tally.longest) == (3, 9)
    assert chosen[0] == 1  # the leak's own row, before the worse one within it
    assert sorted(chosen) == [0, 1, 2, 3, 4, 5]


def test_people_are_ordered_by_leaks_and_left_out_without_any(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = folder_of(tmp_path)
    own = {"Viola": (3, 1), "Orsino": (2, 2), "Feste": (0, 0)}
    users = [
        {**user, "unique_by_text": own.get(user["user"], (0, 0))[0], "leaks": own.get(user["user"], (0, 0))[1]}
        for user in users_of(PLAIN, PEOPLE)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(users), folder / "users.parquet")
    found = read_users(folder)
    assert [(user["user"], user["unique"]) for user in found.worst] == [("Orsino", 2), ("Viola", 3)]
    assert (found.num_with_unique, found.num_unique) == (2, 5)


def test_a_report_of_0_1_is_told_as_it_was():
    old = {"unique": 3, "users_with_unique": 2, "num_users": 9, "distinct_sequences": 8}
    assert verdict(old)[0] == "This model completes 3 pieces of text that only one person wrote."
    assert [line.name for line in summary_lines(old)][:2] == ["Unique sequences", "People affected"]


def test_what_goes_by_tokens_says_so(opened, tmp_path):
    rows = by_text([*PLAIN, row(sequence=" no. 7", total_in_d=3, owner="Viola")], LEAKS)
    folder = folder_of(tmp_path, rows)
    (folder / "snapshots.json").write_text(json.dumps(sample_snapshots(3)))
    page = opened(write_page("leakage", folder / "report.html", folder=folder))
    assert "Unique goes by tokens here" in page.locator("#snapshots").inner_text()
    meaning = page.locator(".lines div", has=page.get_by_text("Curated", exact=True)).inner_text()
    assert "unique by tokens" in meaning
    page.locator("#only-unique").uncheck()
    page.locator("#sequence-table tbody tr.row").filter(has_text="no. 7").click()
    told = page.locator("#sequence-table .detail").inner_text()
    assert "written 3 times, in these tokens, always by one person." in told


@pytest.fixture
def shown(opened, tmp_path):
    folder = folder_of(tmp_path)
    return opened(write_page("leakage", folder / "report.html", folder=folder))


def test_a_leak_is_one_line_that_opens_to_its_sequences(shown):
    lines = shown.locator("#sequence-table tbody tr.row")
    assert lines.count() == 1
    cells = lines.first.locator("td").all_inner_texts()
    assert cells[0].startswith("account DE44 5001")
    assert "and 2 sequences" in cells[0]
    assert cells[1:4] == ["9", "60.0", "1.10"]  # its longest; the worst ratio; the surest
    assert cells[7].strip() == "Viola"
    lines.first.click()
    others = shown.locator("#sequence-table .others li").all_inner_texts()
    assert [text.split()[0] for text in others] == ["DE44", "5001"]
    assert "4 tokens · perplexity 1.10 · ratio 60.0" in others[0]


def test_a_search_finds_a_leak_by_any_of_its_sequences(shown):
    shown.locator("#search").fill("and more")
    assert shown.locator("#sequence-table tbody tr.row").count() == 1


def test_what_others_wrote_too_is_nobodys_and_says_so(shown):
    shown.locator("#only-unique").uncheck()
    lines = shown.locator("#sequence-table tbody tr.row")
    assert lines.count() == 4
    line = lines.filter(has_text="33").first
    assert line.locator("td").all_inner_texts()[6:] == ["5", ""]
    line.click()
    assert "As text 5 people wrote it" in shown.locator("#sequence-table .detail").inner_text()


BEYOND = {"unique_beyond_prior": 2, "leaks_beyond_prior": 1, "people_beyond_prior": 1}
CONTEXTS = {
    "contexts": {
        "training": {"sequences": 3, "leaks": 1, "people": 1, "tokens": 1.0},
        "short": {"sequences": 2, "leaks": 1, "people": 1, "tokens": 0.625},
        "template": {"sequences": 0, "leaks": 0, "people": 0, "tokens": 0.0},
        "other": None,
    },
    "short_prefix": 8,
    "context_template": "Mail by {user}: <b>",
}
NEAR = {
    "distance": 0.1, "window_tokens": 20, "windows": 12_000, "drawn": 200, "continuations": 985,
    "unique": 190, "exact": 3, "found": 7, "people": 2, "estimate": 420.0, "low": 169.9, "high": 848.2,
}  # fmt: skip


def test_what_anybody_would_say_is_told_or_said_not_to_be_known(tmp_path, opened):
    rows = [one | {"beyond_prior": place != 2} for place, one in enumerate(ROWS)]
    rows[0] |= {"unique_by_text": True, "leak": 0, "beyond_prior": False, "users_by_text": 1}
    folder = folder_of(tmp_path, rows, **BEYOND)
    page = opened(write_page("leakage", folder / "report.html", folder=folder))
    assert "The public model would not say 2 of 3 sequences itself." in page.content()
    line = page.locator(".lines div", has_text="Beyond the prior").inner_text()
    assert "2 of 3" in line
    assert "They are in 1 leak of 1 person. The others anybody would say." in line
    tags = page.locator("#sequence-table tbody tr.row .tags").all_inner_texts()
    # The leak of which one sequence is beyond the prior is not marked.
    assert [text.count("anybody would say it") for text in tags] == [1, 0]
    unknown = dict.fromkeys(BEYOND)
    lines = {line.name: line for line in summary_lines({**FIGURES, **unknown})}
    assert lines["Beyond the prior"].value == "not known"
    assert "No public model was given" in lines["Beyond the prior"].sentence
    assert "Beyond the prior" not in {line.name for line in summary_lines(FIGURES)}  # of 0.1


def test_what_is_left_behind_other_words_is_a_table(tmp_path, opened):
    assert "Without the exact words" not in render_page("leakage", folder=folder_of(tmp_path))
    folder = folder_of(tmp_path, **CONTEXTS)
    page = opened(write_page("leakage", folder / "report.html", folder=folder))
    cells = [
        row.locator("td").all_inner_texts() for row in page.locator("#contexts tbody tr").all()
    ]
    assert cells == [
        ["all that stood before it", "1", "1", "3", "100%"],
        ["the last 8 tokens of that", "1", "1", "2", "62.5%"],
        ["“Mail by {user}: <b>”", "0", "0", "0", "0%"],
        ["8 tokens of somebody else's", *["not known"] * 4],
    ]


def test_what_comes_out_nearly_is_told_with_what_it_makes_of_all_windows():
    (line,) = [one for one in summary_lines({**FIGURES, "near": NEAR}) if "Nearly" in one.name]
    assert line.value == "7 of 200 windows"
    assert (
        "at most 10% of their characters changed; 3 of them it completes exactly." in line.sentence
    )
    assert "They are 2 people's." in line.sentence
    assert "about 420 (95%: 170 to 848)" in line.sentence
