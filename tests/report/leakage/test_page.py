"""The page as text: small, alone, silent when redacted, and fit for odd reports."""

import json
import math
import re
import stat
from itertools import chain, repeat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from report.leakage.folders import (
    PEOPLE,
    redacted,
    row,
    sample_rows,
    sample_snapshots,
    summary_of,
    users_of,
    write_folder,
    write_sequences,
)
from report.leakage.test_words import LEDGER
from report.samples import Reader
from tightlip.core.errors import UsageError
from tightlip.report.kit import render_page, write_page

MOST_BYTES = 3_000_000


def page_of(folder):
    return render_page("leakage", folder=folder)


def size(page: str) -> int:
    return len(page.encode())


def test_the_page_is_written_whole_for_its_owner_only(tmp_path):
    folder = write_folder(tmp_path / "r", sample_rows(30))
    path = write_page("leakage", folder / "report.html", folder=folder)
    assert path == folder / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text(encoding="utf-8") == page_of(folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "owners.parquet",
        "report.html",
        "sequences.parquet",
        "summary.json",
        "users.parquet",
    ]


def test_the_page_is_small_with_300_000_rows(tmp_path):
    base = sample_rows(3000, seed=1)
    folder = write_folder(tmp_path / "r", base)
    write_sequences(folder, chain.from_iterable(repeat(base, 100)), 3000)
    page = page_of(folder)
    assert size(page) < MOST_BYTES
    shown = len(Reader(page).data["sequences"])
    assert f"Showing {shown:,} of 300,000; all are in sequences.parquet" in page


def test_the_page_is_small_with_contexts_of_100_kb(tmp_path):
    long = "<&\x01" * 34_000
    rows = [
        row(
            sequence=long,
            contexts=[long] * 8,
            context_tokens=[9] * 8,
            perplexities=[2.0] * 8,
            owner=f"{place}{long[:10_000]}",
        )
        for place in range(250)
    ]
    folder = tmp_path / "r"
    write_folder(folder, rows[:1], users=users_of(rows, [r["owner"] for r in rows]))
    write_sequences(folder, (rows[place % 250] for place in range(500)), 50)
    page = page_of(folder)
    assert size(page) < MOST_BYTES
    assert len(Reader(page).data["sequences"]) > 50


def test_the_page_stands_alone_naming_no_other_file_and_no_address(tmp_path):
    page = page_of(write_folder(tmp_path / "r", sample_rows(40), snapshots=sample_snapshots(4)))
    reader = Reader(page)
    for tag, attributes in reader.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert "style" not in attributes  # the policy would refuse it
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    assert not re.search(r"https?://", page)


def test_nothing_runs_that_the_policy_does_not_name(tmp_path):
    page = page_of(write_folder(tmp_path / "r", sample_rows(5)))
    policy = next(
        a["content"]
        for tag, a in Reader(page).elements
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(), st.text(), st.text(min_size=1), st.text())
def test_any_text_arrives_as_itself_and_as_nothing_else(tmp_path, sequence, context, owner, note):
    rows = [row(sequence=sequence, contexts=[context], owner=owner)]
    reader = Reader(page_of(write_folder(tmp_path / "r", rows, people=[owner], notes=[note])))
    entry = reader.data["sequences"][0]
    assert entry[1] == sequence[:600]
    assert entry[12][0][0] == context[-280:]
    assert reader.data["owners"][0][0] == owner[:60]
    assert [tag for tag, _ in reader.elements].count("script") == 2


def test_markup_in_a_note_a_path_or_a_reason_stays_text(tmp_path):
    bad = "<img src=x onerror=alert(1)>"
    guarantee = {**LEDGER, "because": bad, "covers": [bad]}
    reader = Reader(
        page_of(
            write_folder(
                tmp_path / "r", sample_rows(9), notes=[bad], public_model=bad, guarantee=guarantee
            )
        )
    )
    assert "img" not in [tag for tag, _ in reader.elements]
    assert bad in reader.visible


def test_a_redacted_page_is_silent(tmp_path):
    secret, before, name = "quintessence of dust", "what a piece of work", "Rosencrantz"
    leaky = [
        row(sequence=secret, contexts=[before], num_tokens=12, context_tokens=[31], owner="user 17")
    ]
    folder = write_folder(tmp_path / "r", leaky, people=["user 17"], redacted=True)
    page = page_of(folder)
    assert not any(word in page for word in (secret, before, name))
    assert "user 17" in page
    assert 'id="search"' not in page
    assert "redacted: no text in this file" in page
    stored = write_folder(tmp_path / "s", redacted(leaky), people=["user 1"], redacted=True)
    assert Reader(page_of(stored)).data["sequences"][0][1:4] == [None, 0, 12]


@pytest.mark.parametrize(
    "guarantee", [None, {**LEDGER, "standing": "measured only", "because": "triplet training"}]
)
def test_without_a_guarantee_no_epsilon_is_printed(tmp_path, guarantee):
    page = page_of(
        write_folder(
            tmp_path / "r", sample_rows(20), guarantee=guarantee, snapshots=sample_snapshots(3)
        )
    )
    assert "No guarantee: " in page
    assert "ε" not in page
    assert "4.68" not in page


@pytest.mark.parametrize("standing", ["proved", "as published"])
def test_the_standing_stands_wherever_epsilon_does(tmp_path, standing):
    page = page_of(
        write_folder(tmp_path / "r", sample_rows(20), guarantee={**LEDGER, "standing": standing})
    )
    visible = Reader(page).visible
    assert "ε = 4.68" in visible
    assert all(
        standing in visible[found.start() : found.start() + 60]
        for found in re.finditer("ε", visible)
    )


def test_zero_unique_sequences_say_what_that_means_and_does_not(tmp_path):
    rows = [r for r in sample_rows(60) if r["users_in_d"] > 1]
    reader = Reader(page_of(write_folder(tmp_path / "r", rows)))
    assert "None found" in reader.visible
    assert "not a proof" in reader.visible
    assert len(reader.data["sequences"]) == len(rows)


def test_a_report_without_sequences_still_reads(tmp_path):
    visible = Reader(page_of(write_folder(tmp_path / "r", []))).visible
    assert "completed nothing" in visible
    assert "Nobody here has a unique sequence" in visible


def test_without_a_public_model_the_page_says_what_one_would_add(tmp_path):
    page = page_of(write_folder(tmp_path / "r", sample_rows(60, public=False)))
    assert "--public-model" in Reader(page).visible
    assert "data-no-ratio" in page
    assert 'id="min-ratio"' not in page


def test_infinite_and_undefined_numbers_are_survived(tmp_path):
    odd = [math.inf, math.nan, 0.0, -1.0, 1e300]
    rows = [row(perplexities=[value], public_perplexities=[value], ratio=value) for value in odd]
    snapshots = sample_snapshots(3)
    snapshots["snapshots"][1].update(
        train_perplexity=math.inf, validation_perplexity=math.nan, unique_perplexities=odd
    )
    page = page_of(
        write_folder(
            tmp_path / "r", rows, leakage_epsilon=math.inf, perplexity=math.nan, snapshots=snapshots
        )
    )
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert not re.search(r'="[^"]*\b(nan|inf)\b', svg)


@pytest.mark.parametrize("num", [1, 2, 25, 300])
def test_snapshots_give_the_three_plots_of_figure_5(tmp_path, num):
    page = page_of(
        write_folder(
            tmp_path / "r",
            sample_rows(20),
            snapshots=sample_snapshots(num) if num < 300 else many_snapshots(num),
        )
    )
    for title in (
        "Perplexity per epoch",
        "Lengths of unique sequences per epoch",
        "Perplexities of unique sequences per epoch",
    ):
        assert f'aria-label="{title}' in page
    assert size(page) < MOST_BYTES


def many_snapshots(num: int) -> dict:
    one = sample_snapshots(1)["snapshots"][0]
    return {
        "snapshots": [{**one, "name": f"step-{i}", "epoch": None, "step": i} for i in range(num)],
        "best_validation": "step-7",
    }


def test_snapshots_with_nothing_unique_are_drawn_empty(tmp_path):
    one = sample_snapshots(1)["snapshots"][0]
    quiet = {
        **one,
        "summary": {"unique": 0, "leakage_epsilon": None},
        "unique_lengths": {},
        "unique_perplexities": [],
    }
    page = page_of(
        write_folder(
            tmp_path / "r",
            sample_rows(5),
            snapshots={"snapshots": [quiet], "best_validation": None},
        )
    )
    assert "Unique sequences went from 0 to 0 over 1 snapshot." in page


def test_thousands_of_people_are_summed_up(tmp_path):
    people = [f"{name} {place}" for place in range(400) for name in PEOPLE]
    rows = [row(owner=name) for name in people]
    users = [
        {
            "user": name,
            "num_documents": 1,
            "num_tokens": 9,
            "unique": 1,
            "unique_tokens": 2,
            "longest": 2,
            "max_ratio": 3.0,
        }
        for name in people
    ]
    page = page_of(write_folder(tmp_path / "r", rows, users=users))
    assert "Showing 300 of the 5,600 with any; all are in users.parquet." in page


def test_a_folder_that_is_no_report_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"no summary\.json"):
        page_of(tmp_path)


def test_an_older_summary_without_the_newer_keys_still_renders(tmp_path):
    rows = sample_rows(10)
    folder = write_folder(tmp_path / "r", rows)
    kept = {
        key: value
        for key, value in summary_of(rows, users_of(rows)).items()
        if key in ("unique", "num_users", "distinct_sequences", "top_k")
    }
    (folder / "summary.json").write_text(json.dumps(kept))
    assert "not known" in page_of(folder)
