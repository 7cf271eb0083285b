"""Choosing among settings with privacy: what leaves, what it costs, and what a kill changes."""

import json
import logging
import math
import re
import signal
import stat
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dp_accounting.pld import PLDAccountant

import tightlip
from privacy.accounts import theirs
from tightlip.core import register as registers
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.run_folder import open_run
from tightlip.core.settings import toml_text
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.privacy.selection import Selection
from tightlip.training import trials as module
from tightlip.training.checkpoints import Diverged
from tightlip.training.config import RunOptions
from tightlip.training.loop import Training
from tightlip.training.trials import Draw, Trials, drawn
from training.small_corpora import documents, other_peoples_documents

pytestmark = pytest.mark.slow

SMALL = {
    "embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "sequence_length": 10,
    "mitigation": "dp", "noise_multiplier": 1.0, "steps": 4,
}  # fmt: skip
# The second takes no step worth the name, and stays as bad as it began.
CANDIDATES = [{"learning_rate": 0.3}, {"learning_rate": 1e-6, "batch_size": 4}]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Forty people's text, and beside it public text of the same kind."""
    folder = tmp_path_factory.mktemp("corpus")
    words = prepare(other_peoples_documents(), folder / "words", PrepareConfig())
    rows = [{"text": row["text"]} for row in other_peoples_documents(seed=5)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "public.parquet")
    public = str(folder / "public.parquet")
    config = PrepareConfig(tokenizer=str(words.tokenizer_folder), public_validation=public)
    return prepare(documents(num_documents=200, num_users=40), folder / "c", config)


def trials_file(folder, candidates=CANDIDATES, **settings):
    path = folder / "trials.toml"
    path.write_text(toml_text({**settings, "candidate": candidates}))
    return str(path)


def chosen_in(folder, corpus, *, file=None, options=None, **settings):
    file = file or trials_file(folder, all=True)
    return tightlip.train(corpus, folder / "run", trials=file, options=options, **SMALL | settings)


@pytest.fixture(scope="module")
def choice(corpus, tmp_path_factory):
    """A choice between two candidates, each trained once; what was registered, and what was seen."""
    folder, seen = tmp_path_factory.mktemp("choice"), []
    plain = module.train_model

    def watched(*args, **kwargs):
        run = plain(*args, **kwargs)
        seen.append({"name": run.folder.name, **run.metrics[-1], **run.guarantee})
        return run

    with pytest.MonkeyPatch.context() as patch, registers.kept_in(folder):
        patch.setattr(module, "train_model", watched)
        run = chosen_in(folder, corpus, snapshot="none")
        entries = registers.entries(registers.RUN)
    return run, entries, seen


def test_only_the_best_trial_leaves(choice):
    run, _, seen = choice
    best, other = sorted(seen, key=lambda each: each["validation_perplexity"])
    assert run.metrics[-1]["validation_perplexity"] == best["validation_perplexity"]
    assert run.metrics[-1]["learning_rate"] == best["learning_rate"]
    assert run.config["train"]["learning_rate"] == best["learning_rate"]
    assert "trials" not in run.config["train"]
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert {path.relative_to(run.folder).parts[0] for path in files} == {
        *(".tightlip.sha256", "config.toml", "ledger.json", "log.txt"),
        *("metrics.jsonl", "private.jsonl", "model"),
    }
    told = b"".join(path.read_bytes() for path in files)
    times = [path.stat().st_mtime for path in files]
    assert max(times) - min(times) < 2  # however long ago the best trial ended
    assert not re.search(rb"\d\d:\d\d:\d\d", (run.folder / "log.txt").read_bytes())
    assert repr(other["validation_perplexity"]).encode() not in told
    assert not any(each["name"].encode() in told for each in seen)


def test_the_ledger_and_the_card_have_the_epsilon_of_the_choice(choice):
    run, _, seen = choice
    both = theirs(theirs(PLDAccountant(), 1.0, 8 / 40, 4), 1.0, 4 / 40, 4).get_epsilon(1e-5)
    record = run.guarantee
    assert record["epsilon"] == pytest.approx(both, rel=1e-3)
    assert record["epsilon"] > max(each["epsilon"] for each in seen)
    assert record["mechanism"] == "selection among trials"
    assert (record["standing"], record["finished"], record["steps"]) == ("proved", True, 4)
    assert any("how long the choice took" in each for each in record["outside"])
    card = json.loads((run.model_folder / "guarantee.json").read_text())
    assert card["epsilon"] == record["epsilon"]
    assert "selection among trials" in (run.model_folder / "README.md").read_text()
    # Whoever opens a trial on its way finds no promise in it.
    assert {each["standing"] for each in seen} == {"as published"}


def test_the_choice_is_registered_once_and_with_all_that_it_costs(choice):
    run, entries, _ = choice
    (entry,) = entries
    assert entry["terms"]["epsilon"] == run.guarantee["epsilon"]
    assert entry["terms"]["run"] == run.guarantee["run"]
    assert entry["ledger"] == str(run.folder / "ledger.json")
    assert run.guarantee["people"]["epsilon"] == run.guarantee["epsilon"]


def test_a_finished_choice_is_returned_as_it_is_and_no_other_one_in_its_place(
    choice, corpus, tmp_path
):
    run, _, _ = choice
    again = chosen_in(run.folder.parent, corpus, snapshot="none")
    assert again.guarantee == run.guarantee
    other = trials_file(tmp_path, CANDIDATES[:1], all=True)
    with pytest.raises(UsageError, match=r"other settings \(candidate\)"):
        chosen_in(run.folder.parent, corpus, file=other, snapshot="none")


def test_of_the_trials_nothing_is_shown_and_what_is_cheaper_is_said(
    corpus, tmp_path, monkeypatch, caplog
):
    """Three trials of a secret draw, stopped in the second and gone on with."""
    file = trials_file(tmp_path, mean=3.0)
    monkeypatch.setattr(module, "drawn_number", lambda mean, generator: 3)
    step, taken = Training.take_step, []

    def dies(self):
        if len(taken) == 6:  # the third step of the second trial, the first two not yet saved
            raise KeyboardInterrupt
        taken.append(self.progress.step)
        step(self)

    options = RunOptions(checkpoint_seconds=1e6)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(Training, "take_step", dies)
        with pytest.raises(KeyboardInterrupt):
            chosen_in(tmp_path, corpus, file=file, options=options)
    (line,) = [each for each in caplog.messages if "Training each of" in each]
    assert "the 2 candidates once and counting them all is cheaper" in line
    assert not any(word in caplog.text for word in ("Epoch", "Going on", "parameters"))

    draw = tmp_path / "run" / "trials" / "draw.json"
    before = json.loads(draw.read_text())
    assert (before["done"], len(before["candidates"])) == (1, 3)
    assert stat.S_IMODE(draw.stat().st_mode) == 0o600
    under_way = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert not under_way["finished"]

    drawn_again = []
    monkeypatch.setattr(module, "drawn", lambda *given: drawn_again.append(given))
    run = chosen_in(tmp_path, corpus, file=file, options=options)
    assert not drawn_again
    assert run.finished
    assert not draw.parent.exists()
    # Two steps had to be taken again, and count for whichever candidate they were of.
    planned = Selection.of_record(under_way)
    assert run.guarantee["epsilon"] == planned.with_more_steps(2).epsilon() > planned.epsilon()
    figures = [
        f"{math.ceil(100 * each['epsilon']) / 100:.2f}" for each in (run.guarantee, under_way)
    ]
    (line,) = [each for each in caplog.messages if "The choice costs" in each]
    assert line.startswith("The choice costs ε {}, where {} was planned: a killed trial took 2 steps".format(*figures))  # fmt: skip
    assert run.guarantee["run"] == under_way["run"]
    entries = registers.entries(registers.RUN)
    assert {entry["terms"]["run"] for entry in entries} == {under_way["run"]}
    assert entries[-1]["terms"]["epsilon"] == run.guarantee["epsilon"]
    cards = run.folder.rglob("guarantee.json")
    assert {json.loads(card.read_text())["epsilon"] for card in cards} == {run.guarantee["epsilon"]}


def test_killed_again_and_again_the_same_choice_goes_on(command, corpus, tmp_path):
    """Killed wherever it is about to rename a file, later each time, to its very end."""
    file = trials_file(tmp_path, all=True)
    config = tmp_path / "run.toml"
    settings = {**SMALL, "steps": 2, "snapshot": "none", "trials": file}
    config.write_text(toml_text({"train": settings, "options": {"checkpoint_seconds": 0}}))
    words = ("train", corpus.folder, "--out", tmp_path / "run", "--config", config)
    draws, runs, applied, deaths = set(), set(), 0, 0
    for rename in (2, 6, 11, 16, 23, 31, 12, 9, 7, 5, 3, 4, 2):
        life = command.begin(*words, die_before_rename=rename)
        ended = life.end()
        applied += len(life.events("step"))
        if ended.status == 0:
            break
        assert ended.status == -signal.SIGKILL, ended.err
        deaths += 1
        draw = tmp_path / "run" / "trials" / "draw.json"
        if draw.exists() and not (tmp_path / "run" / "model").exists():
            there = json.loads(draw.read_text())
            draws.add((*there["candidates"], *there["names"]))
        ledger = tmp_path / "run" / "ledger.json"
        runs |= {json.loads(ledger.read_text())["run"]} if ledger.exists() else set()
    assert deaths >= 5
    assert len(draws) == 1
    ended = command(*words)
    assert ended.status == 0, ended.err
    run = open_run(tmp_path / "run")
    assert run.finished
    assert not (tmp_path / "run" / "trials").exists()
    # All steps that were ever applied, spread over two trials, are at most what was counted.
    counted = Selection.of_record(run.guarantee)
    assert sum(steps for _, steps in counted.candidates) >= applied
    assert run.guarantee["epsilon"] == counted.epsilon()
    assert runs == {run.guarantee["run"]}


def test_without_its_draw_a_choice_does_not_go_on(corpus, tmp_path, monkeypatch):
    def dies(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Training, "take_step", dies)
        with pytest.raises(KeyboardInterrupt):
            chosen_in(tmp_path, corpus)
    (tmp_path / "run" / "trials" / "draw.json").unlink()
    with pytest.raises(GuaranteeError, match=r"draw\.json is missing"):
        chosen_in(tmp_path, corpus)


def test_a_trial_that_diverged_is_worse_than_any_and_nothing_is_told_of_none(
    corpus, tmp_path, monkeypatch
):
    def diverges(self):
        raise Diverged("no numbers")

    with monkeypatch.context() as patch:
        patch.setattr(Training, "run", diverges)
        with pytest.raises(UsageError, match="No trial came to a score"):
            chosen_in(tmp_path, corpus)
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "trials").exists()  # nor how many there were
    (entry,) = registers.entries(registers.RUN)
    assert entry["terms"]["epsilon"] > 0


def test_a_candidate_that_cannot_be_trained_is_refused_before_anything_is_charged(corpus, tmp_path):
    bad = {"model": "transformer", "num_heads": 3, "hidden_size": 8}
    file = trials_file(tmp_path, [*CANDIDATES, bad], all=True)
    with pytest.raises(UsageError, match="num_heads=3"):
        chosen_in(tmp_path, corpus, file=file)
    assert not registers.entries(registers.RUN)
    assert not (tmp_path / "run").exists()


LEDGER = {"steps": 4, "epsilon": 1.0}


def best_of(scores, generator):
    draw = drawn(Trials(all=True, candidate=({},) * len(scores)), generator)
    for score in scores:
        draw.note(score, LEDGER, 4)
    return draw.best


def test_of_equal_scores_each_is_as_likely_to_be_kept():
    generator = np.random.default_rng(0)
    kept = Counter(best_of([2.0, 1.0, 1.0, float("inf"), 1.0], generator) for _ in range(3000))
    assert {*kept} == {1, 2, 4}
    assert all(abs(count - 1000) < 150 for count in kept.values())
    assert best_of([float("inf")] * 3, generator) is None


def test_a_promise_that_one_trial_lost_is_lost_for_the_choice():
    draw = Draw(candidates=[0, 0], names=[1, 2])
    draw.note(3.0, {"steps": 4, "epsilon": None, "because": "Rows mixed."}, 4)
    draw.note(2.0, LEDGER | {"steps": 9}, 4)
    assert (draw.best, draw.taken_back, draw.repeated) == (1, "Rows mixed.", 5)


def test_each_trial_draws_any_candidate(monkeypatch):
    monkeypatch.setattr(module, "drawn_number", lambda mean, generator: 3000)
    draw = drawn(Trials(mean=2.0, candidate=({}, {}, {})), np.random.default_rng(1))
    assert all(abs(draw.candidates.count(each) - 1000) < 150 for each in range(3))


@pytest.mark.parametrize(
    ("candidates", "settings", "changed", "words"),
    [
        (CANDIDATES, {}, {}, "Trials need mean = 10"),
        (CANDIDATES, {"mean": 3, "all": True}, {}, "Give one of them"),
        ([], {"all": True}, {}, "nothing to choose among"),
        ([{"unit": "example"}], {"all": True}, {}, "candidate 1: unit is the same for all"),
        (
            [{}, {"lerning_rate": 1}],
            {"all": True},
            {},
            "candidate 2: Unknown setting 'lerning_rate'",
        ),
        ([{"model": "/tmp"}], {"all": True}, {}, "is a folder, and all trials start from the same"),
        (CANDIDATES, {"all": True}, {"epsilon": 2.0}, "what the whole choice may cost"),
        (CANDIDATES, {"all": True}, {"insecure_seed": 1}, "neither insecure_seed nor"),
        (CANDIDATES, {"all": True}, {"noise_multiplier": 0.0}, "no finite ε"),
        (CANDIDATES, {"mean": 1}, {}, "mean=1 is out of range"),
    ],
)
def test_what_cannot_be_chosen_among_is_refused(
    candidates, settings, changed, words, corpus, tmp_path
):
    file = trials_file(tmp_path, candidates, **settings)
    with pytest.raises(UsageError, match=words):
        chosen_in(tmp_path, corpus, file=file, **changed)
    assert not (tmp_path / "run").exists()


def test_a_choice_by_private_text_is_refused(corpus, tmp_path):
    tokenizer = str(corpus.tokenizer_folder)
    held = prepare(documents(), tmp_path / "c", PrepareConfig(tokenizer=tokenizer, split="text"))
    with pytest.raises(UsageError, match="chosen by their perplexity on public text"):
        chosen_in(tmp_path, held, batch_size=2)
    with pytest.raises(UsageError, match="are for private training"):
        tightlip.train(corpus, tmp_path / "plain", trials=trials_file(tmp_path, all=True))


def test_trials_may_be_chosen_by_a_noisy_loss_that_each_of_them_is_charged_for(corpus, tmp_path):
    tokenizer = str(corpus.tokenizer_folder)
    rows = documents(num_documents=200, num_users=40)
    held = prepare(rows, tmp_path / "c", PrepareConfig(tokenizer=tokenizer, split="text"))
    run = chosen_in(tmp_path, held, noisy_validation=4.0, snapshot="none")
    assert run.metrics[-1]["noisy_validation_perplexity"] > 1
    assert run.metrics[-1]["validation_perplexity"] is None
    told = [each["releases"] for each in run.guarantee["selection"]["candidates"]]
    assert [len(each) for each in told] == [1, 1]
    noise = [each[0]["noise_multiplier"] for each in told]
    both = theirs(theirs(PLDAccountant(), 1.0, 0.2, 4, noise[0]), 1.0, 0.1, 4, noise[1])
    assert run.guarantee["epsilon"] == pytest.approx(both.get_epsilon(1e-5), rel=1e-3)
