"""The demo from end to end, on a few speeches and with a step or two of training."""

import json

import pyarrow as pa
import pytest

import tightlip.experiments.demo as demo
import tightlip.experiments.demo as second_act
from tightlip.corpus.bundled import demo_corpus
from tightlip.models.loading import load_tokenizer

pytestmark = pytest.mark.slow

FEWER_WORDS = 60


@pytest.fixture
def over_soon(monkeypatch):
    """Speakers of 40 to 60 words are the users, and training is a few steps."""
    monkeypatch.setattr(demo, "FEWEST_WORDS", 40)
    monkeypatch.setattr(demo, "MOST_WORDS", FEWER_WORDS)
    for settings in (demo.TRAIN, second_act.SHAPE):
        monkeypatch.setitem(settings, "embedding_size", 8)
        monkeypatch.setitem(settings, "hidden_size", 8)
    monkeypatch.setitem(demo.TRAIN, "epochs", 1.0)
    monkeypatch.setitem(second_act.REFERENCE, "epochs", 0.05)
    monkeypatch.setattr(second_act, "REPETITIONS", (1, 4))
    monkeypatch.setattr(second_act, "NUM_NAMES", 5)
    for name, settings in second_act.RUNS.items():
        batch = {"batch_size": 16} if name == "dp" else {}
        monkeypatch.setitem(second_act.RUNS, name, settings | batch | {"epochs": 1.0})


def test_the_users_are_the_110_speakers_that_the_page_speaks_of():
    lines, others = demo.speakers()
    assert len({line["user"] for line in lines}) == 110
    assert not {line["user"] for line in lines} & {line["user"] for line in others}
    assert len(lines) + len(others) == demo_corpus().num_rows
    assert any("110 speakers are too few" in note for note in second_act.NOTES)


def test_the_second_act_compares_four_ways_with_a_control_and_goes_on_where_it_stopped(
    over_soon, tmp_path
):
    made = demo.run_comparison(tmp_path)
    rows = {row["name"]: row for row in made.rows}
    assert list(rows) == ["plain", "by-user", "adversarial", "triplet", "dp"]
    assert rows["dp"]["guarantee"]["standing"] == "proved"
    assert [rows[name]["guarantee"]["standing"] for name in rows if name != "dp"] == [
        "measured only"
    ] * 4
    page = made.page.read_text(encoding="utf-8")
    assert "110 speakers are too few" in page
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert len(before) >= 6
    again = demo.run_comparison(tmp_path)
    assert again.rows == made.rows
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_no_canary_is_held_out_and_every_copy_is_trained_on(over_soon, tmp_path):
    users, others = demo.speakers()
    lines = second_act.planted_lines(tmp_path, table(users), table(others))
    key = json.loads(lines.key.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(lines.corpus.tokenizer_folder)
    for canary in key["canaries"]:
        ids = tokenizer(canary["text"], add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert times(lines.corpus.train, ids) == canary["repetitions"]
        assert times(lines.corpus.validation, ids) == 0


def table(rows):
    return pa.Table.from_pylist(rows)


def times(corpus, ids):
    return sum(corpus.document(n).tolist() == ids for n in range(corpus.num_documents))
