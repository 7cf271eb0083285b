"""What the page carries: escaped, cut, and within its budget."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tightlip.report.leakage as rows_module
from report.leakage.folders import PEOPLE, redacted, row, sample_rows, users_of, write_folder
from tightlip.core.errors import UsageError
from tightlip.report.leakage import (
    NUM_USERS,
    cut_end,
    cut_start,
    embed,
    num_bytes,
    plain_number,
    read_users,
    safe_json,
)

NASTY = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    "&lt;",
    "\u2028\u2029",
    "\u202eback",
    "\x00\x07\x1b[31m",
    "😀",
    "שלום",
    "\\u003c",
]


@settings(max_examples=60)
@given(st.lists(st.none() | st.text() | st.sampled_from(NASTY) | st.integers(), max_size=6))
def test_embedded_json_is_inert_and_faithful(value):
    written = safe_json(value)
    assert not set(written) & set("<>&\u2028\u2029")
    assert json.loads(written) == value


@given(st.text(max_size=50), st.integers(1, 20))
def test_cutting_keeps_the_rest_and_counts_what_went(text, most):
    start, cut = cut_end(text, most)
    assert text.startswith(start)
    assert len(start) + cut == len(text)
    end, cut = cut_start(text, most)
    assert text.endswith(end)
    assert len(end) + cut == len(text)


@given(st.floats(allow_nan=False))
def test_numbers_keep_six_figures(value):
    assert float(plain_number(value)) == pytest.approx(value, rel=1e-5)


def test_what_json_has_no_number_for_becomes_a_word():
    assert [plain_number(x) for x in (math.nan, math.inf, -math.inf, None)] == [
        "NaN",
        "Infinity",
        "-Infinity",
        None,
    ]


def test_rows_come_in_the_file_s_order_with_their_owner(tmp_path):
    rows = sample_rows(300)
    folder = write_folder(tmp_path / "r", rows, row_group=37)
    embedded = embed(folder, list(reversed(range(300))), users_of(rows), redacted=False)
    assert [entry[0] for entry in embedded.sequences] == list(range(300))
    for entry, original in zip(embedded.sequences, rows, strict=True):
        assert entry[1] == original["sequence"]
        names = [embedded.owners[place][0] for place in entry[11]]
        assert names == ([] if original["owner"] is None else [original["owner"]])
        assert [found[0] for found in entry[12]] == original["contexts"]


def test_within_budget_the_first_chosen_stay(tmp_path, monkeypatch):
    rows = [
        row(
            sequence="w" * 5000,
            contexts=["c" * 100_000] * 8,
            context_tokens=[9] * 8,
            perplexities=[2.0] * 8,
        )
        for _ in range(40)
    ]
    folder = write_folder(tmp_path / "r", rows)
    monkeypatch.setattr(rows_module, "SEQUENCES_BYTES", 20_000)
    embedded = embed(folder, [5, 3, *range(10, 40)], [], redacted=False)
    kept = [entry[0] for entry in embedded.sequences]
    assert kept[:2] == [3, 5]
    assert len(kept) < 32
    assert num_bytes(embedded.sequences) <= 20_000
    assert embedded.sequences[0][2] == 5000 - len(embedded.sequences[0][1])


def test_names_too_long_are_cut_and_stay_apart(tmp_path):
    names = ["x" * 10_000 + "a", "x" * 10_000 + "b"]
    rows = [row(owner=name) for name in names]
    embedded = embed(
        write_folder(tmp_path / "r", rows, people=names),
        [0, 1],
        users_of(rows, names),
        redacted=False,
    )
    assert [entry[11] for entry in embedded.sequences] == [[0], [1]]
    assert num_bytes(embedded.owners) < 300


def test_a_redacted_page_is_silent_even_where_the_file_is_not(tmp_path):
    rows = sample_rows(50)
    embedded = embed(write_folder(tmp_path / "r", rows), list(range(50)), [], redacted=True)
    assert all(entry[1] is None for entry in embedded.sequences)
    assert all(found[0] is None for entry in embedded.sequences for found in entry[12])
    stored = embed(
        write_folder(tmp_path / "s", redacted(rows)), list(range(50)), [], redacted=False
    )
    assert [entry[12] for entry in stored.sequences] == [entry[12] for entry in embedded.sequences]


def test_the_users_who_leak_most_agree_with_sorting(tmp_path):
    people = [f"reader {place}" for place in range(1500)]
    users = [
        {
            "user": name,
            "num_documents": 1,
            "num_tokens": 100,
            "unique": (place * 7919) % 83,
            "unique_tokens": place % 17,
            "longest": 1,
            "max_ratio": None,
        }
        for place, name in enumerate(people)
    ]
    found = read_users(write_folder(tmp_path / "r", [], users=users))
    leaking = [user for user in users if user["unique"]]
    expected = sorted(leaking, key=lambda user: (-user["unique"], -user["unique_tokens"]))
    assert found.worst == expected[:NUM_USERS]
    assert (found.num_users, found.num_with_unique) == (1500, len(leaking))
    assert found.num_unique == sum(user["unique"] for user in users)


def test_a_folder_that_is_no_report_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"no users\.parquet"):
        read_users(tmp_path)
    with pytest.raises(UsageError, match=r"no sequences\.parquet"):
        embed(tmp_path, [], [], redacted=False)


def test_nobody_leaking_gives_no_share(tmp_path):
    rows = [row(users_in_d=2, owner=None)]
    found = read_users(write_folder(tmp_path / "r", rows))
    assert found.worst == []
    assert found.share_of_first(10) is None
    assert found.num_users == len(PEOPLE)
