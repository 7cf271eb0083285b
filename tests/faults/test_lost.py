"""What is lost or damaged in a run is never passed over: not its ledger, checkpoint, or history."""

import json
import os
import shutil

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import tightlip
from by_hand import unlisted
from faults.cases import SMALL, write_place
from standins import BigramTable
from tightlip.core.checksums import listed
from tightlip.core.errors import DamagedError, GuaranteeError, UsageError
from tightlip.core.run_folder import moments_in, run_around, write_moment
from tightlip.corpus.prepare import open_prepared
from tightlip.training.checkpoints import Progress

pytestmark = pytest.mark.slow


@pytest.fixture
def place(shared, tmp_path):
    return shutil.copytree(shared("faults", write_place), tmp_path / "place")


def flip(path, at=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_damaged_run_is_not_taken_for_no_run_at_all(place):
    """Whoever asks what a reference learnt from must not hear: nothing."""
    assert run_around(place / "run/model") is not None
    flip(place / "run/metrics.jsonl")
    with pytest.raises(DamagedError):
        run_around(place / "run/model")


def test_a_finished_run_with_a_damaged_ledger_is_not_trained_again(place, command):
    before = (place / "run/model/model.safetensors").stat().st_mtime_ns
    flip(place / "run/ledger.json")
    ran = command("train", "corpus.parquet", "--out", "run", *SMALL, place=place)
    assert ran.status == 3, ran.err
    assert "ledger.json is damaged" in ran.refusal
    assert (place / "run/model/model.safetensors").stat().st_mtime_ns == before


def test_held_out_text_that_is_gone_is_missed(place):
    shutil.rmtree(place / "run/corpus/validation")
    with pytest.raises(DamagedError, match="validation is missing"):
        open_prepared(place / "run/corpus")


def test_a_file_of_a_model_that_is_gone_is_missed(place, command):
    (place / "run/model/tokenizer_config.json").unlink()
    ran = command("audit", "run", "--out", "out", place=place)
    assert ran.status == 2
    assert "tokenizer_config.json is missing" in ran.refusal


def test_a_damaged_tokenizer_is_not_prepared_with(place, command):
    flip(place / "run/corpus/tokenizer/tokenizer.json", at=-20)
    given = ("--tokenizer", "run/corpus/tokenizer", "--out", "out")
    ran = command("prepare", "corpus.parquet", *given, place=place)
    assert ran.status == 2
    assert "tokenizer.json is damaged" in ran.refusal


@pytest.fixture
def moments(tmp_path):
    for step in (2, 10):
        write_moment(tmp_path / f"step-{step}", {}, Progress(step=step))
    return tmp_path


def test_of_damaged_moments_only_the_latest_is_missed(moments):
    flip(moments / "step-2/state.json")
    (found,) = moments_in(moments, Progress, start_over=False)
    assert found.name == "step-10"
    assert (moments / "damaged-step-2").is_dir()


@pytest.mark.parametrize("harm", ["flipped", "gone"])
def test_a_private_run_does_not_begin_anew_by_itself(moments, harm):
    path = moments / "step-10/tensors.safetensors"
    flip(path) if harm == "flipped" else path.unlink()
    with pytest.raises(GuaranteeError, match="step-10 is damaged"):
        moments_in(moments, Progress, start_over=False)
    (found,) = moments_in(moments, Progress)
    assert found.name == "step-2"


def test_a_disk_that_fails_to_read_throws_no_moment_away(moments, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tightlip.core.checksums.digest_of", fails)
    with pytest.raises(OSError, match="Input/output"):
        moments_in(moments, Progress)
    assert (moments / "step-10").is_dir()


def test_a_report_of_snapshots_is_listed_whole(place, command):
    ran = command("audit", "run", "--out", "out", "--snapshots", place=place)
    assert ran.status == 0, ran.err
    names = {"summary.json", "sequences.parquet", "owners.parquet", "users.parquet"}
    assert {*listed(place / "out")} == names | {"snapshots.json"}


@pytest.mark.parametrize("trick", ["pipe", "device", "folder"])
def test_a_list_that_is_no_file_is_refused_and_not_read(place, command, trick):
    path = place / "run/model/.tightlip.sha256"
    path.unlink()
    if trick == "pipe":
        os.mkfifo(path)
    elif trick == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    ran = command("audit", "run", "--out", "out", place=place, kill_after=20)
    assert ran.status == 2
    assert "is neither a file" in ran.refusal or "is damaged" in ran.refusal


@pytest.mark.parametrize("change", [{"num_layers": -1}, {"n_layer": -1}])
def test_a_pipe_or_a_negative_size_in_a_model_folder_is_refused(place, command, change):
    model = shutil.copytree(place / "run/model", place / "model")
    unlisted(model / "config.json")
    os.mkfifo(model / "adapter_config.json")
    ran = command("audit", "model", "corpus.parquet", "--out", "out", place=place, kill_after=20)
    assert "is neither a file nor a folder" in ran.refusal
    (model / "adapter_config.json").unlink()
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    ran = command("audit", "model", "corpus.parquet", "--out", "out", place=place)
    assert ran.status == 2, ran.err


def test_a_tokenizer_that_makes_nothing_of_the_text_passes_no_gate():
    class Silent(PreTrainedTokenizerFast):
        is_fast = False

        def __call__(self, texts, **_):
            return {"input_ids": [[] for _ in texts]}

    backend = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer = Silent(tokenizer_object=backend)
    with pytest.raises(UsageError, match="no token of any text"):
        tightlip.audit(BigramTable(4, 0), [("ann", "ant")], tokenizer=tokenizer)


def test_an_out_that_leads_nowhere_is_refused_in_words(place, command):
    (place / "loop").symlink_to("loop")
    ran = command("audit", "run", "--out", "loop/report", place=place)
    assert ran.status == 2
    assert "leads nowhere" in ran.refusal


@pytest.mark.parametrize("file", ["ledger.json", "log.txt", "metrics.jsonl"])
def test_a_pipe_in_the_place_of_a_record_hangs_nobody(place, command, file):
    shutil.rmtree(place / "checked/model")  # as if it were not finished
    (place / "checked" / file).unlink(missing_ok=True)
    os.mkfifo(place / "checked" / file)
    flags = ("--mitigation", "dp", "--epsilon", "8", "--unit", "example", "--allow-unproved")
    words = ("train", "corpus.parquet", "--out", "checked", *SMALL, *flags)
    for each in ((*words, "--dp-check-canaries", "20"), ("ledger", "checked")):
        ran = command(*each, place=place, kill_after=30)
        assert ran.status in (0, 2, 3), (ran.status, ran.err)
        if file == "ledger.json":
            assert ran.status == 3, ran.err
