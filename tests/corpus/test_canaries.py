"""Planting: what goes into the corpus, what the key says, and what is refused."""

import os
import stat
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from animals import WORDS
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json, write_json
from tightlip.corpus.canaries import (
    PAPER_SCHEDULE,
    SHORT_SCHEDULE,
    CanaryConfig,
    _drawn,
    read_canary_key,
)
from tightlip.corpus.canaries import plant_in as plant_canaries
from tightlip.corpus.canary_templates import read_template
from tightlip.corpus.readers import open_corpus

ROWS = [
    {"user": f"u{number % 3}", "text": f"{WORDS[number % 16]} and {number}", "place": number}
    for number in range(40)
]


def planted_in(out, rows=ROWS, **settings):
    planted = plant_canaries(open_corpus(rows), out, CanaryConfig(**settings))
    return planted, pq.read_table(out / "corpus.parquet").to_pylist()


@pytest.mark.parametrize("seed", range(5))
def test_copies_are_there_as_often_as_the_key_says_and_nothing_is_lost(tmp_path, seed):
    planted, rows = planted_in(
        tmp_path / "p",
        templates=["My ID is {digits:6}", "{words:3}!"],
        repetitions=[1, 4, 9],
        seed=seed,
    )
    secrets = {canary.text for canary in planted.canaries}
    assert len(secrets) == len(planted.canaries) == 6
    assert [row for row in rows if row["text"] not in secrets] == ROWS
    copies = Counter((row["user"], row["text"]) for row in rows if row["text"] in secrets)
    assert copies == {(c.user, c.text): c.repetitions for c in planted.canaries}
    assert all(row["place"] is None for row in rows if row["text"] in secrets)


def test_copies_lie_anywhere_the_ends_included(tmp_path):
    places = set()
    for seed in range(60):
        _, rows = planted_in(
            tmp_path / str(seed), ROWS[:2], templates=["{digits:4}"], repetitions=[1], seed=seed
        )
        places.add([row["place"] for row in rows].index(None))
    assert places == {0, 1, 2}


def test_the_paper_plants_five_words_for_each_user_by_its_schedule(tmp_path):
    rows = [("long", "ant bee cat")] * 195 + [("short", "dog eel fox gnu hen")] * 194
    planted, _ = planted_in(tmp_path / "p", rows)
    assert sum(PAPER_SCHEDULE) == 195
    by_user = {
        user: [c.repetitions for c in planted.canaries if c.user == user]
        for user in ("long", "short")
    }
    assert by_user == {"long": list(PAPER_SCHEDULE), "short": list(SHORT_SCHEDULE)}
    for canary in planted.canaries:
        assert len(canary.text.split()) == 5
        assert set(canary.text.split()) <= {"ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"}


def test_each_user_has_secrets_of_their_own(tmp_path):
    planted, _ = planted_in(
        tmp_path / "p", templates=["PIN {digits:4}"], repetitions=[1, 10], per_user=True
    )
    assert [(c.user, c.repetitions) for c in planted.canaries] == [
        (user, times) for user in ("u0", "u1", "u2") for times in (1, 10)
    ]
    assert len({canary.text for canary in planted.canaries}) == 6


def test_without_per_user_canaries_go_to_different_users_while_there_are_any(tmp_path):
    planted, _ = planted_in(tmp_path / "p", templates=["PIN {digits:4}"], repetitions=[1, 1, 1])
    assert {canary.user for canary in planted.canaries} == {"u0", "u1", "u2"}


def test_names_and_words_come_from_the_lists_given(tmp_path):
    planted, _ = planted_in(
        tmp_path / "p",
        templates=["{names} likes {words:2}"],
        repetitions=[1] * 4,
        words=["red", "blue", "red", ""],
        names=["Mary Ann", "Bob "],
    )
    assert planted.pools == {"names": ["Mary Ann", "Bob"], "words": ["red", "blue"]}
    for canary in planted.canaries:
        assert canary.values[0] in ("Mary Ann", "Bob")
        assert canary.text == f"{canary.values[0]} likes {canary.values[1]} {canary.values[2]}"


def test_digits_are_uniform(tmp_path):
    planted, _ = planted_in(tmp_path / "p", templates=["{digits:8}"], repetitions=[1] * 500)
    counts = Counter("".join(canary.text for canary in planted.canaries))
    # 4,000 digits: 400 of each, standard deviation 19.
    assert all(abs(counts[digit] - 400) < 80 for digit in "0123456789")


def test_a_text_with_two_readings_is_planted_no_oftener_than_others():
    names = ["ant", "bee cat", "ant bee", "cat"]
    texts = {f"{one} {other}" for one in names for other in names}
    assert len(texts) == 15  # "ant bee cat" has two
    draw = np.random.default_rng(0)
    template, pools = read_template("{names} {names}"), {"names": names}
    found = Counter(_drawn([template], [("u", 1)], pools, draw)[0].text for _ in range(3000))
    # 200 of each, standard deviation 14; 375 if it were drawn by values.
    assert found["ant bee cat"] < 260
    assert set(found) == texts


@pytest.mark.parametrize(("num", "warned"), [(4, False), (5, True)])
def test_canaries_that_could_never_be_shown_are_warned_of_when_planted(
    tmp_path, caplog, num, warned
):
    # Known by heart: log2(100 - 4 + 1) = 6.600 against log2(4 / 0.05) = 6.32;
    # log2(100 - 5 + 1) = 6.585 against log2(5 / 0.05) = 6.64.
    planted_in(tmp_path / "p", templates=["PIN {digits:2}"], repetitions=[1] * num)
    assert ("'PIN {digits:2}' can never be shown" in caplog.text) == warned


def test_every_planted_canary_of_one_space_counts_in_the_warning(tmp_path, caplog):
    templates = ["PIN {digits:2}", "PIN {digits:1}{digits:1}", "{digits:6}"]
    planted_in(tmp_path / "p", templates=templates, repetitions=[1, 1])
    assert (
        "'PIN {digits:2}' can never be shown: a canary known by heart has 6.6 bits" in caplog.text
    )
    assert "among 6 canaries more than 6.9" in caplog.text
    assert "'{digits:6}'" not in caplog.text


def test_only_the_owner_reads_the_key_and_it_comes_back_the_same(tmp_path):
    planted, _ = planted_in(tmp_path / "p", templates=["{digits:6}"], repetitions=[1, 2])
    again, _ = planted_in(tmp_path / "q", templates=["{digits:6}"], repetitions=[1, 2])
    other, _ = planted_in(tmp_path / "r", templates=["{digits:6}"], repetitions=[1, 2], seed=1)
    assert stat.S_IMODE(os.stat(tmp_path / "p/key.json").st_mode) == 0o600
    assert read_canary_key(tmp_path / "p/key.json") == planted == again
    assert other != planted


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("My ID is", "has no slot"),
        ("My ID is {digit:6}", "Closest: digits"),
        ("My ID is {digits}", "does not say how many"),
        ("My ID is {digits:0}", "not a number from 1"),
        ("My ID is {digits:six}", "not a number from 1"),
        ("My {ID is {digits:6}", "belongs to no slot"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(template, reason):
    with pytest.raises(UsageError, match=reason):
        read_template(template)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"templates": ["{digits:1}"], "repetitions": [1] * 6}, "in 10 ways, too few for 6"),
        ({"templates": ["{names}"], "repetitions": [1]}, "Give names; on the command line: a file"),
        ({"templates": ["{words:2}"], "words": ["one"]}, "1 different values"),
        ({"repetitions": [0, 1]}, "from 1 on"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, settings, reason):
    with pytest.raises(UsageError, match=reason):
        planted_in(tmp_path / "p", **settings)
    assert not (tmp_path / "p").exists()


def test_nothing_is_overwritten(tmp_path):
    planted_in(tmp_path / "p", templates=["{digits:6}"], repetitions=[1])
    with pytest.raises(UsageError, match="not empty"):
        planted_in(tmp_path / "p", templates=["{digits:6}"], repetitions=[1])


def test_a_damaged_key_is_refused(tmp_path):
    planted_in(tmp_path / "p", templates=["{digits:6}"], repetitions=[1])
    path = tmp_path / "p/key.json"
    whole = read_json(path)
    del whole["sha256"]
    whole["canaries"][0]["text"] = "something else"
    write_json(path, whole)
    with pytest.raises(UsageError, match="damaged, or no key of canaries"):
        read_canary_key(path)
    write_json(path, ["no key"])
    with pytest.raises(UsageError, match="damaged"):
        read_canary_key(path)
    with pytest.raises(UsageError, match="is not a key"):
        read_canary_key(tmp_path / "nowhere.json")
