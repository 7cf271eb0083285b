"""The page of a report on chats: totals and filters by role, and by what was trained on."""

import io
from collections import Counter

import pytest
from rich.console import Console

from report.leakage.folders import by_text, redacted, row, write_folder
from report.samples import Reader
from tightlip.report.kit import render_page, write_page
from tightlip.report.leakage.tallies import tally_and_choose
from tightlip.report.leakage.words import terminal_table

LEAKS = {0: 0, 1: 0, 2: 2, 3: 3, 4: 4}  # the second is a part of the first
SAID = [
    (" card 4711 0815", "assistant", True, "Viola"),
    (" 0815", "user", False, "Viola"),
    (" the old mill", "user", False, "Orsino"),
    (" at my sister's", "user", True, "Feste"),
    (" be brief with Olivia", "system", False, "Olivia"),
    (" thank you", "user", True, None),
]
ROWS = by_text(
    [
        row(
            sequence=text, num_tokens=9 - place, ratio=None, owner=owner, role=role,
            trained_on=trained, users_in_d=1 if owner else 4,
        )
        for place, (text, role, trained, owner) in enumerate(SAID)
    ],
    LEAKS,
)  # fmt: skip
BY_ROLE = dict(Counter(role for _, role, _, owner in SAID if owner))
FIGURES = {
    "leaks": 4, "people_affected": 4, "unique_by_text": 5, "unique_by_role": BY_ROLE,
    "public_model": None,
}  # fmt: skip


def folder_of(tmp_path, rows=ROWS, **changed):
    return write_folder(tmp_path / "r", rows, **{**FIGURES, **changed})


def printed(summary):
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal_table(summary))
    return console.file.getvalue()


def test_totals_by_role_stand_in_the_lead_the_list_and_the_terminal(tmp_path):
    page = Reader(render_page("leakage", folder=folder_of(tmp_path))).visible
    assert "Sequences by role: 3 user, 1 system, 1 assistant." in page
    num = sum(not trained for _, _, trained, owner in SAID if owner)
    assert f"{num} sequences were completed without being trained on." in page
    for role, count in BY_ROLE.items():
        assert f"{count} {role}" in printed(FIGURES)


@pytest.mark.parametrize("by_role", [None, {"text": 5}])
def test_where_nobody_has_a_role_there_is_no_word_of_roles(tmp_path, opened, by_role):
    role = None if by_role is None else "text"
    rows = [{**one, "role": role, "trained_on": role and True} for one in ROWS]
    folder = folder_of(tmp_path, rows, unique_by_role=by_role)
    shown = opened(write_page("leakage", folder / "report.html", folder=folder))
    assert shown.locator("#role").count() == 0
    assert shown.locator("#trained").count() == (by_role is not None)
    words = shown.locator("main").inner_text() + shown.locator("header").inner_text()
    assert "by role" not in words.lower()
    assert shown.locator(".tag").all_inner_texts() == ["and 1 sequence within or across it"]
    assert "By role" not in printed({**FIGURES, "unique_by_role": by_role})


@pytest.fixture
def shown(opened, tmp_path):
    folder = folder_of(tmp_path)
    return opened(write_page("leakage", folder / "report.html", folder=folder))


def leaks_with(role, trained):
    """Oracle: the leaks of which one sequence is of this role and was trained on, or not."""
    return {
        leak
        for place, leak in LEAKS.items()
        if role in ("", SAID[place][1]) and trained in ("", str(SAID[place][2]).lower())
    }


@pytest.mark.parametrize("role", ["", "user", "assistant", "system"])
@pytest.mark.parametrize("trained", ["", "true", "false"])
def test_the_table_is_filtered_by_role_and_by_what_was_trained_on(shown, role, trained):
    shown.select_option("#role", role)
    shown.select_option("#trained", trained)
    lines = shown.locator("#sequence-table tbody tr.row .clip").all_inner_texts()
    assert sorted(lines) == sorted(SAID[leak][0].strip() for leak in leaks_with(role, trained))
    shown.locator("#filters [type=reset]").click()
    shown.locator("#sequence-table tbody tr.row").nth(3).wait_for()


def test_each_row_has_its_roles_and_a_leak_opens_to_those_of_its_sequences(shown):
    lines = shown.locator("#sequence-table tbody tr.row")
    tags = [lines.nth(place).locator(".tag").all_inner_texts() for place in range(3)]
    assert tags[0][:2] == ["assistant", "user"]
    assert tags[1:] == [["user", "not trained on"], ["user"]]
    lines.nth(0).click()
    opened = shown.locator("#sequence-table .detail")
    assert "Role: assistant." in opened.inner_text()
    assert "Not trained on" not in opened.inner_text()
    assert "user · not trained on · 8 tokens" in opened.locator(".others li").inner_text()


def test_a_redacted_page_has_roles_and_no_text(tmp_path):
    folder = folder_of(tmp_path, redacted(ROWS), redacted=True)
    page = render_page("leakage", folder=folder)
    assert [one[16] for one in Reader(page).data["sequences"]] == [role for _, role, _, _ in SAID]
    assert not [text for text, *_ in SAID if text.strip() in page]


def test_a_role_that_ranks_last_is_on_the_page_all_the_same(tmp_path):
    roles = ["assistant"] * 4000 + ["user"] * 5
    rows = [row(role=role, trained_on=role != "user", num_tokens=2) for role in roles]
    rows = by_text(rows, {place: place for place in range(len(rows))})
    tally, chosen = tally_and_choose(folder_of(tmp_path, rows), [])
    assert tally.num_untrained == 5
    assert {place for place in chosen if roles[place] == "user"} == set(range(4000, 4005))
