import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import tightlip
from finetunes.making import sft_trainer
from finetunes.people import texts, tokenizer
from tightlip.core.errors import UsageError
from tightlip.trainer import LeakageCallback

EPOCHS = {"num_train_epochs": 3, "max_steps": -1, "per_device_train_batch_size": 1, "completion_only_loss": False}  # fmt: skip
ROWS = [{"user": row["user"], "text": row["prompt"] + row["completion"]} for row in texts()]


class Recorder(TrainerCallback):
    """A logger like any other."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, dict(logs)))


def trained(base, folder, *callbacks, rows=ROWS, **changes):
    torch.manual_seed(0)
    trainer = sft_trainer(base, rows, folder, **EPOCHS | changes)
    for each in callbacks:
        trainer.add_callback(each)
    trainer.train()
    return trainer


def told(recorder):
    return {
        step: logs
        for step, logs in recorder.seen
        if any(name.startswith("leakage/") for name in logs)
    }


def test_every_epoch_is_audited_and_every_logger_told(base, tmp_path):
    recorder, callback = Recorder(), LeakageCallback(ROWS)
    saved = {"save_strategy": "epoch", "logging_strategy": "epoch", "save_total_limit": None}
    trainer = trained(base, tmp_path, recorder, callback, **saved)
    checkpoints = sorted(tmp_path.glob("checkpoint-*"), key=lambda one: int(one.name[11:]))
    assert len(checkpoints) == len(callback.reports) == 3
    for checkpoint, report in zip(checkpoints, callback.reports, strict=True):
        own = tightlip.audit(checkpoint, ROWS, tokenizer=tokenizer()).summary
        logs = told(recorder)[int(checkpoint.name[11:])]
        assert logs["leakage/unique"] == own["unique_by_text"] == report.summary["unique_by_text"]
        assert logs["leakage/people"] == own["people_affected"]
        assert logs["leakage/leaks"] == own["leaks"]
        assert "leakage/exposure" not in logs
    assert callback.reports[-1].summary["leaks"] > 0
    history = [each for each in trainer.state.log_history if "leakage/leaks" in each]
    assert [each["step"] for each in history] == [int(one.name[11:]) for one in checkpoints]
    # The trainer's own line is not swallowed.
    assert [step for step, logs in recorder.seen if "loss" in logs] == [8, 16, 24]
    kept = json.loads((tmp_path / "_leakage" / "step-00000024" / "summary.json").read_text())
    assert kept["leaks"] == callback.reports[-1].summary["leaks"]


def test_auditing_changes_nothing_of_the_training(base, tmp_path):
    one = trained(base, tmp_path / "one").model
    other = trained(base, tmp_path / "other", LeakageCallback(ROWS, every=1)).model
    assert other.training == one.training
    for name, each in one.state_dict().items():
        assert torch.equal(each, other.state_dict()[name]), name


def test_a_gate_that_fails_stops_the_training(base, tmp_path):
    callback = LeakageCallback(ROWS, every=1, fail_on="unique_by_text>=0", out=tmp_path / "reports")
    trainer = trained(base, tmp_path / "run", callback)
    assert trainer.state.global_step == 1
    assert callback.stopped_by[0].startswith("unique_by_text>=0")
    assert [one.name for one in (tmp_path / "reports").iterdir()] == ["step-00000001"]


def test_a_gate_that_holds_lets_it_go_on(base, tmp_path):
    callback = LeakageCallback(ROWS, fail_on=["people_affected>1000"])
    assert trained(base, tmp_path, callback).state.global_step == 24
    assert not callback.stopped_by


def test_a_sample_is_of_the_corpus_and_always_the_same(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    first, again = (LeakageCallback(tmp_path / "rows.jsonl", sample=4).corpus for _ in range(2))
    assert first == again
    assert len(first) == 4
    assert all(row in ROWS for row in first)
    assert LeakageCallback(ROWS, sample=1000).corpus == ROWS


def test_the_exposure_of_planted_canaries_is_logged(base, tmp_path):
    """As measured on the folder that the trainer saves."""
    planted = tightlip.plant_canaries(
        ROWS, tmp_path / "planted", templates=("my locker is {digits:2}",), repetitions=(20,)
    )
    rows = pq.read_table(tmp_path / "planted" / "corpus.parquet").to_pylist()
    recorder = Recorder()
    callback = LeakageCallback(rows, every="save", canaries=tmp_path / "planted" / "key.json")
    saved = {"save_strategy": "steps", "save_steps": 14, "max_steps": 14}
    trained(base, tmp_path / "run", recorder, callback, rows=rows, **saved)
    (logs,) = told(recorder).values()
    checkpoint = tmp_path / "run" / "checkpoint-14"
    (own,) = tightlip.measure_canaries(checkpoint, tmp_path / "planted" / "key.json")
    assert logs["leakage/exposure"] == pytest.approx(own["exposure_bits"])
    assert own["text"] == planted.canaries[0].text


@pytest.mark.parametrize("every", ["often", 0, True])
def test_a_time_that_is_none_is_refused(every):
    with pytest.raises(UsageError, match="neither 'epoch'"):
        LeakageCallback(ROWS, every=every)


def test_a_gate_on_no_figure_is_refused_before_training():
    with pytest.raises(UsageError, match="leeks"):
        LeakageCallback(ROWS, fail_on="leeks>0")


@pytest.mark.parametrize(
    "wrong",
    [
        {"corpus": "nowhere.parquet"},
        {"validation": "nowhere.parquet"},
        {"user_colum": "user"},
        {"text_column": "words"},
        {"top_k": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_an_audit_would_refuse_is_refused_before_training(wrong, tmp_path):
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    with pytest.raises(UsageError):
        LeakageCallback(**{"corpus": path, **wrong})


def test_a_trainer_without_a_tokenizer_is_told_what_to_give(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    state = type("State", (), {"is_world_process_zero": True, "global_step": 1})
    args = type("Args", (), {"output_dir": str(tmp_path)})
    with pytest.raises(UsageError, match="no processing_class"):
        LeakageCallback(ROWS, every=1).on_step_end(
            args, state, None, model=model, processing_class=None
        )


def test_a_model_that_is_spread_over_processes_is_refused():
    args = type("Args", (), {"fsdp": "full_shard"})
    with pytest.raises(UsageError, match="tightlip audit OUT CORPUS --snapshots"):
        LeakageCallback(ROWS).on_train_begin(args, None, None)


@pytest.mark.parametrize("name", ["reports", ".", "deep/_down"])
def test_reports_that_a_push_would_publish_are_refused(tmp_path, name):
    args = type("Args", (), {"output_dir": str(tmp_path)})
    with pytest.raises(UsageError, match="push_to_hub would publish"):
        LeakageCallback(ROWS, out=tmp_path / name).on_train_begin(args, None, None)
    LeakageCallback(ROWS, out=tmp_path / "_own" / name).on_train_begin(args, None, None)
