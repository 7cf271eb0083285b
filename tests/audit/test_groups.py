"""Who pays: perplexities and gaps against plain sums, intervals against repeated experiments."""

import math
import random
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tightlip.audit.group_figures import (
    MOST_BINS,
    GroupFigures,
    attribute_groups,
    curve,
    held_text_of,
    perplexities,
    sample_bins,
    top_and_low,
    user_rows,
)
from tightlip.corpus.readers import open_corpus
from tightlip.scan.document_scores import DocumentScores


def columns_in(folder):
    return open_corpus(folder / "validation.parquet").columns_beside()


def scores_of(losses, tokens):
    none = np.zeros(len(tokens))
    return DocumentScores(
        loss_nats=np.array(losses, float),
        num_tokens=np.array(tokens, float),
        lowest_nats=none,
        num_lowest=none,
    )


def made_rows(num_users=14, seed=0):
    """(user, loss, unmitigated loss, tokens) of some documents; a few have no token."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_users * 5):
        tokens = draw.choice([0, 3, 8, 20])
        rate = draw.uniform(2, 4)
        rows.append((draw.randrange(num_users), tokens * rate, tokens * (rate - 0.5), tokens))
    return rows


def text_of(rows, num_samples, *, with_baseline=True):
    owners, losses, baselines, tokens = (np.array(column) for column in zip(*rows, strict=True))
    return held_text_of(
        scores_of(losses, tokens),
        scores_of(baselines, tokens) if with_baseline else None,
        owners,
        [f"user {number:02d}" for number in range(len(num_samples))],
        np.array(num_samples),
    )


def figures_of(text, *, seed=0, num_bootstraps=200):
    return GroupFigures(text, np.random.default_rng(seed), num_bootstraps)


def sums_by_hand(rows):
    """Oracle: loss, unmitigated loss and tokens of each user, one document after the other."""
    sums = defaultdict(lambda: [0.0, 0.0, 0])
    for user, loss, baseline, tokens in rows:
        if tokens:
            for place, value in enumerate((loss, baseline, tokens)):
                sums[f"user {user:02d}"][place] += value
    return sums


def test_a_users_perplexity_is_exp_of_their_loss_per_token():
    rows = made_rows()
    found = user_rows(text_of(rows, range(14)))
    expected = sums_by_hand(rows)
    assert {row["user"] for row in found} == set(expected)
    for row in found:
        loss, baseline, tokens = expected[row["user"]]
        assert row["num_test_tokens"] == tokens
        assert row["loss_nats"] == pytest.approx(loss)
        assert row["perplexity"] == pytest.approx(math.exp(loss / tokens))
        assert row["baseline_perplexity"] == pytest.approx(math.exp(baseline / tokens))
        assert row["change"] == pytest.approx(row["perplexity"] - row["baseline_perplexity"])
        mine = [r for r in rows if f"user {r[0]:02d}" == row["user"] and r[3]]
        assert row["num_test_documents"] == len(mine)


def test_without_another_run_nothing_is_said_of_change():
    text = text_of(made_rows(), range(14), with_baseline=False)
    assert all(row["change"] is row["baseline_perplexity"] is None for row in user_rows(text))
    assert figures_of(text).of()["change"] is None
    assert all(row["change"] is None for row in curve(text, figures_of(text)))


def test_equal_numbers_of_samples_are_ordered_by_name_and_nobody_is_on_both_sides():
    rows = [(user, 4.0, 3.0, 2) for user in range(12)]
    text = text_of(rows, [7] * 12)
    top, low = top_and_low(text)
    assert top == [f"user {number:02d}" for number in range(5)]
    assert low == [f"user {number:02d}" for number in (11, 10, 9, 8, 7)]
    shuffled = random.Random(1).sample(rows, len(rows))
    assert top_and_low(text_of(shuffled, [7] * 12)) == (top, low)


def test_who_has_no_test_token_is_in_no_group():
    rows = [(user, 4.0, 3.0, 2) for user in range(11)] + [(11, 0.0, 0.0, 0)]
    text = text_of(rows, [5] * 11 + [0])
    assert text.num_users == 11
    assert "user 11" not in text.user_names
    assert [row["num_samples_from"] for row in curve(text, figures_of(text))] == [4]


def test_few_users_are_halved():
    rows = [(user, 4.0, 3.0, 2) for user in range(5)]
    top, low = top_and_low(text_of(rows, [5, 4, 3, 2, 1]))
    assert (top, low) == (["user 00", "user 01"], ["user 04", "user 03"])


def test_the_gap_is_low_five_minus_top_five_of_mitigated_minus_unmitigated():
    rows = made_rows(16, seed=3)
    num_samples = [3 * number % 17 for number in range(16)]
    gap = figures_of(text_of(rows, num_samples)).gap()
    sums = sums_by_hand(rows)
    line = sorted(sums, key=lambda user: num_samples[int(user[5:])])

    def mean_change(users, change):
        return sum(change(*sums[user]) for user in users) / 5

    def plain(loss, baseline, tokens):
        return math.exp(loss / tokens) - math.exp(baseline / tokens)

    def log(loss, baseline, tokens):
        return loss / tokens - baseline / tokens

    for name, change in (("perplexity", plain), ("log", log)):
        expected = mean_change(line[:5], change) - mean_change(line[-5:], change)
        assert gap[name]["value"] == pytest.approx(expected)
        assert gap[name]["low"] < expected < gap[name]["high"]


def test_the_gap_is_positive_where_those_with_little_text_lose_more():
    rows = [(user, 8 * (3.5 if user < 5 else 3.1), 24.0, 8) for user in range(12)]
    gap = figures_of(text_of(rows, [1] * 5 + [50] * 7)).gap()
    assert gap["log"]["value"] == pytest.approx(0.4)
    assert gap["perplexity"]["low"] > 0


def test_the_same_losses_in_both_runs_give_no_gap_at_all():
    rows = [(user, loss, loss, tokens) for user, loss, _, tokens in made_rows()]
    gap = figures_of(text_of(rows, range(14))).gap()
    assert gap["perplexity"] == gap["log"] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.05), (0.2, 2.0)])
def test_the_gaps_interval_holds_the_truth_about_as_often_as_it_says(between, within):
    """Users' changes in log-perplexity are drawn around 0; so is what their documents show."""
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        rows = [
            (user, 60 + 10 * change, 60.0, 10)
            for user, habit in enumerate(draw.normal(0, between, 10))
            for change in habit + draw.normal(0, within, 6)
        ]
        text = text_of(rows, [1] * 5 + [9] * 5)
        log = figures_of(text, seed=int(draw.integers(2**31)), num_bootstraps=150).gap()["log"]
        covered += log["low"] <= 0 <= log["high"]
    assert covered >= 52  # of 60; 95% would be 57


def test_overall_perplexity_pools_all_text_and_its_interval_is_of_users():
    """One user with a thousand copies of a document is one user."""
    draw = np.random.default_rng(1)
    rates = draw.normal(3, 0.3, 30)
    rows = [(user, 10 * rate, 20.0, 10) for user, rate in enumerate(rates) for _ in range(4)]
    once = figures_of(text_of(rows[::4], range(30)), num_bootstraps=2000).of()["perplexity"]
    often = figures_of(text_of(rows, range(30)), num_bootstraps=2000).of()["perplexity"]
    assert once == pytest.approx(often)
    assert often["value"] == pytest.approx(math.exp(rates.mean()))
    error = rates.std(ddof=1) / math.sqrt(30) * 2.045  # Student's, 29 degrees
    assert math.log(often["high"]) == pytest.approx(rates.mean() + error, abs=0.3 * error)
    assert math.log(often["low"]) == pytest.approx(rates.mean() - error, abs=0.3 * error)


def test_one_user_has_no_interval():
    found = figures_of(text_of([(0, 6.0, 5.0, 2), (0, 4.0, 5.0, 2)], [3])).of()
    assert found["perplexity"] == {"value": pytest.approx(math.exp(2.5)), "low": None, "high": None}


def test_a_loss_beyond_numbers_is_still_a_number():
    assert np.isfinite(perplexities(np.array([1e6]), np.array([2.0]))).all()


@pytest.mark.parametrize("seed", range(10))
def test_every_user_stands_in_one_of_at_most_eight_bins(seed):
    draw = np.random.default_rng(seed)
    counts = (10 ** draw.uniform(-0.5, draw.integers(1, 8), 60)).astype(np.int64)
    bins = sample_bins(counts)
    assert len(bins) <= MOST_BINS
    for count in counts:
        assert sum(first <= count <= last for first, last in bins) == 1
    for first, last in bins:
        assert ((counts >= first) & (counts <= last)).any()


def test_the_curve_pools_each_bins_text():
    rows = made_rows(14, seed=5)
    num_samples = [0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 30, 40, 50, 60]
    text = text_of(rows, num_samples)
    found = curve(text, figures_of(text))
    sums = sums_by_hand(rows)
    assert sum(row["num_users"] for row in found) == len(sums)
    for row in found:
        inside = [
            sums[user]
            for user in sums
            if row["num_samples_from"] <= num_samples[int(user[5:])] <= row["num_samples_to"]
        ]
        loss, baseline, tokens = map(sum, zip(*inside, strict=True))
        assert row["perplexity"]["value"] == pytest.approx(math.exp(loss / tokens))
        change = math.exp(loss / tokens) - math.exp(baseline / tokens)
        assert row["change"]["value"] == pytest.approx(change)


def test_attributes_are_groups_of_documents(tmp_path):
    rows = [
        (number % 6, 2.0 * tokens, 1.5 * tokens, tokens) for number, tokens in enumerate([4] * 12)
    ]
    rows[3] = (3, 0.0, 0.0, 0)
    team = ["red", "blue", None] * 4
    table = {
        "user": [f"user {row[0]:02d}" for row in rows],
        "text": ["x"] * 12,
        "team": team,
        "remote": [number < 6 for number in range(12)],
        "sent": [f"day {number}" for number in range(12)],
        "nothing": pa.nulls(12),
    }
    pq.write_table(pa.table(table), tmp_path / "validation.parquet")
    text = text_of(rows, [1] * 6)
    scored = np.array([row[3] > 0 for row in rows])
    groups, notes = attribute_groups(
        columns_in(tmp_path), scored, text, figures_of(text, num_bootstraps=100)
    )
    assert set(groups) == {"team", "remote", "sent"}
    assert notes == []
    assert {name: one["num_documents"] for name, one in groups["team"].items()} == {
        "red": 3,  # row 3 is red and empty
        "blue": 4,
    }
    assert set(groups["remote"]) == {"true", "false"}
    assert groups["team"]["blue"]["num_users"] == 2
    assert groups["team"]["red"]["perplexity"]["value"] == pytest.approx(math.exp(2))
    assert groups["team"]["red"]["change"]["value"] == pytest.approx(math.exp(2) - math.exp(1.5))


def test_a_column_of_many_values_is_no_attribute(tmp_path):
    rows = [(number, 4.0, 3.0, 2) for number in range(60)]
    table = {"user": ["u"] * 60, "text": ["x"] * 60, "id": list(range(60))}
    pq.write_table(pa.table(table), tmp_path / "validation.parquet")
    text = text_of(rows, [1] * 60)
    groups, (note,) = attribute_groups(
        columns_in(tmp_path), np.ones(60, bool), text, figures_of(text)
    )
    assert groups == {}
    assert "'id' has 60 values" in note


def test_the_same_seed_gives_the_same_gap():
    text = text_of(made_rows(), range(14))
    one, two, other = (figures_of(text, seed=seed).gap() for seed in (0, 0, 1))
    assert one == two != other
