import json
import stat

import pytest

from tightlip.core.errors import UsageError
from tightlip.core.run_folder import (
    begin_run,
    check_may_train,
    go_back_to,
    is_run,
    open_run,
    run_around,
    write_ledger,
    write_metrics,
)

TREE = {
    "train": {"model": "lstm", "learning_rate": 0.001, "seed": 0},
    "corpus": {"folder": "corpus", "corpus_fingerprint": "abc"},
}
SAME = {"train": (), "corpus": ("folder",)}


def lines(*steps):
    return [{"step": step, "epoch": step / 10, "snapshot": f"step-{step}"} for step in steps]


@pytest.fixture
def run(tmp_path):
    begin_run(tmp_path, TREE)
    return tmp_path


def test_a_run_under_way_is_open_to_readers_and_not_finished(run):
    write_metrics(run, [*lines(5), {"step": 10, "epoch": 1.0}])
    (run / "snapshots/step-5").mkdir(parents=True)
    record = open_run(run)
    assert record.config == TREE
    assert record.corpus_folder == run / "corpus"
    assert [(s.name, s.step, s.epoch) for s in record.snapshots] == [("step-5", 5, 0.5)]
    assert not record.finished
    assert record.guarantee == {}
    assert record.stop is None


def test_a_run_is_finished_once_model_and_ledger_are_there(run):
    (run / "model").mkdir()
    assert not open_run(run).finished
    write_ledger(run, {"mechanism": "none"})
    write_metrics(run, [{"step": 10, "epoch": 1.0, "stop": "epochs"}])
    record = open_run(run)
    assert record.finished
    assert record.guarantee == {"mechanism": "none"}
    assert record.stop == "epochs"


def test_a_folder_without_a_configuration_is_no_run(tmp_path):
    assert not is_run(tmp_path)
    with pytest.raises(UsageError, match="is not a tightlip run"):
        open_run(tmp_path)


def test_a_run_of_private_vectors_is_named_as_such(tmp_path):
    begin_run(tmp_path, {"represent": {"label": "topic"}, "corpus": {"path": "texts.csv"}})
    with pytest.raises(UsageError, match=r"represent train.*tightlip represent attack"):
        open_run(tmp_path)
    assert run_around(tmp_path) is None


def test_a_configuration_of_something_else_is_no_run(tmp_path):
    begin_run(tmp_path, {"tool": {"name": "other"}})
    with pytest.raises(UsageError, match="is not a run's"):
        open_run(tmp_path)


def test_the_same_settings_may_go_on_and_a_corpus_may_have_moved(run):
    moved = {**TREE, "corpus": {**TREE["corpus"], "folder": "/elsewhere"}}
    check_may_train(run, moved, same=SAME)


def test_other_settings_are_refused_by_name(run):
    other = {"train": {"model": "gru", "learning_rate": 0.001, "seed": 0, "steps": 3}}
    with pytest.raises(UsageError, match=r"other settings \(model, steps, corpus_fingerprint\)"):
        check_may_train(run, other | {"corpus": {"folder": "corpus"}}, same=SAME)


def test_a_setting_inside_a_nested_table_is_named_by_itself(run):
    nested = {"mitigation": "dp", "dp": {"epsilon": 8.0, "delta": 1e-5}}
    begin_run(run, {"train": nested})
    check_may_train(run, {"train": nested}, same={"train": ()})
    # Flat, as 0.1 wrote it, is the same run.
    flat = {"mitigation": "dp", "epsilon": 8.0, "delta": 1e-5, "steps": None}
    check_may_train(run, {"train": flat}, same={"train": ()})
    other = {"mitigation": "dp", "dp": {"epsilon": 2.0, "delta": 1e-5, "clip": 1.0}}
    with pytest.raises(UsageError, match=r"other settings \(clip, epsilon\)"):
        check_may_train(run, {"train": other}, same={"train": ()})


def test_a_name_in_two_tables_is_compared_in_both(run):
    tree = {"train": {"dp": {"seed": 1}, "seed": 0}}
    begin_run(run, tree)
    check_may_train(run, tree, same={"train": ()})
    for other in ({"dp": {"seed": 1}, "seed": 2}, {"dp": {"seed": 2}, "seed": 0}):
        with pytest.raises(UsageError, match=r"other settings \(seed\)"):
            check_may_train(run, {"train": other}, same={"train": ()})


def test_an_unfinished_run_of_an_earlier_version_is_refused_and_a_finished_one_is_not(run):
    now = TREE | {"versions": {"tightlip": "0.2.0"}}
    with pytest.raises(UsageError, match=r"unfinished run of tightlip 0\.1.*with tightlip 0\.1"):
        check_may_train(run, now, same=SAME)
    (run / "model").mkdir()
    write_ledger(run, {"mechanism": "none"})
    check_may_train(run, now, same=SAME)
    begin_run(run, now)
    (run / "ledger.json").unlink()
    check_may_train(run, now, same=SAME)


def test_a_folder_that_holds_something_else_is_refused_but_a_corpus_prepared_inside_is_not(
    tmp_path,
):
    (tmp_path / "corpus").mkdir()
    check_may_train(tmp_path, TREE, same=SAME)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds thesis\.tex and no run"):
        check_may_train(tmp_path, TREE, same=SAME)


def test_going_back_removes_later_snapshots_and_metrics(run):
    write_metrics(run, lines(5, 10, 15))
    for step in (5, 10, 15):
        (run / f"snapshots/step-{step}").mkdir(parents=True)
    go_back_to(run, lines(5, 10))
    assert sorted(path.name for path in (run / "snapshots").iterdir()) == ["step-10", "step-5"]
    written = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [5, 10]


def test_going_back_leaves_what_is_not_ours(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "theirs").touch()
    snapshots = run / "snapshots"
    (snapshots / "notes").mkdir(parents=True)
    (snapshots / ".DS_Store").touch()
    (snapshots / "step-7").symlink_to(elsewhere)
    (snapshots / "step-9").mkdir()
    go_back_to(run, lines(5))
    assert sorted(path.name for path in snapshots.iterdir()) == [".DS_Store", "notes", "step-7"]
    assert (elsewhere / "theirs").exists()


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "..", "step-1/../..", "a", 3, ["x"]])
def test_a_snapshot_whose_name_leads_elsewhere_is_refused(run, name):
    write_metrics(run, [{"step": 5, "epoch": 0.5, "snapshot": name}])
    with pytest.raises(UsageError, match="is not a name that tightlip gives"):
        open_run(run)


def test_a_snapshot_that_is_a_link_is_none(run, tmp_path_factory):
    write_metrics(run, lines(5))
    (run / "snapshots").mkdir()
    (run / "snapshots/step-5").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert open_run(run).snapshots == []


def test_only_the_owner_can_read_a_run(tmp_path):
    begin_run(tmp_path / "run", TREE)
    write_metrics(tmp_path / "run", [])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
