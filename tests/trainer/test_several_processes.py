"""A private SFTTrainer under torchrun: what two processes train, tell and leave is what one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dp_accounting.pld import PLDAccountant
from safetensors.torch import load_file

from privacy.accounts import theirs
from tightlip.core.errors import GuaranteeError
from tightlip.core.files import read_json
from tightlip.core.register import guarantee_beside
from tightlip.privacy.ledger import read_ledger
from trainer import together
from trainer.private_runs import private_sft

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join([str(TESTS), *sys.path])
ENVIRONMENT = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder in which two processes have left their results."""
    folder = tmp_path_factory.mktemp("together")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    script = [*launch, TESTS / "trainer" / "together.py", folder]
    done = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same by one process: the trainings that two must equal."""
    folder, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)  # as the others have
    try:
        asked = {"quiet", "begun", "gone-on", "full"}
        runs = together.scenarios(folder, 1)
        return {name: run() for name, run in runs.items() if name in asked}
    finally:
        torch.set_num_threads(threads)


def results(left, name):
    return [torch.load(left / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]


def are_equal(one, other):
    return [*one] == [*other] and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "wrapped"), [("quiet", "DistributedDataParallel"), ("full", "FSDPLlamaForCausalLM")]
)
def test_adapters_and_whole_models_are_trained_as_by_one_process(left, alone, name, wrapped):
    for each in results(left, name):
        assert each["wrapped"] == wrapped
        assert each["expected_batch"] == alone[name]["expected_batch"] == 8
        for parameter, weight in alone[name]["weights"].items():
            # Adam may round the ends of shards otherwise than a whole tensor.
            within = {"rtol": 1e-5, "atol": 1e-7} if name == "full" else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(each["weights"][parameter], weight, **within)


@pytest.mark.parametrize("name", ["gone-on", "sharded"])
def test_epsilon_is_that_of_one_process_also_after_going_on(left, alone, name):
    for each in results(left, name):
        assert each["metrics"] == alone["gone-on"]["metrics"]
        assert each["step"] == 4
    assert read_ledger(left / name / "ledger.json")["steps"] == 4
    epsilon = alone["gone-on"]["metrics"]["epsilon"]
    assert read_json(left / name / "guarantee.json")["epsilon"] == epsilon
    for number in (2, 4):
        folder = left / name / f"checkpoint-{number}"
        assert guarantee_beside(folder)["steps"] == number
        written = {path.name for path in folder.glob("*model*") if path.suffix in (".safetensors", ".bin")}  # fmt: skip
        assert {*guarantee_beside(folder)["weights"]} == written
        assert f"ε = {epsilon:.3g}" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["gone-on", "sharded"])
def test_all_processes_end_with_the_weights_that_are_saved(left, name):
    first, second = results(left, name)
    assert are_equal(first["weights"], second["weights"])
    saved = load_file(left / name / "adapter_model.safetensors")
    assert len(saved) == len(first["weights"])
    for parameter, weight in first["weights"].items():
        assert torch.equal(saved[parameter.replace(".default", "")], weight)


def test_a_model_that_was_sharded_is_saved_whole(left):
    first, _ = results(left, "full")
    saved = load_file(left / "full" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in first["weights"].items())


@pytest.mark.parametrize("name", ["quiet", "gone-on", "full", "sharded"])
def test_nothing_measured_is_logged_by_any_process(left, name):
    allowed = {"learning_rate", "grad_norm", "epoch", "step", "epsilon", "epsilon_so_far"}
    for each in results(left, name):
        assert all({*line} <= allowed for line in each["history"])


def test_processes_that_accelerate_does_not_join_are_refused(tmp_path, monkeypatch):
    """As accelerate has it where torchrun starts two, there is no GPU, and nobody said use_cpu."""
    trainer = private_sft(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GuaranteeError, match=r"2 processes were started, .* joins 1: .* use_cpu=True"):  # fmt: skip
        trainer.train()
    assert not (tmp_path / "ledger.json").exists()


def test_accelerate_launches_a_private_script_in_two_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from tightlip.trainer import PrivacySpec\n"
        "from trainer.private_runs import private_sft\n"
        "torch.set_num_threads(1)\n"
        "privacy = PrivacySpec(noise_multiplier=1.0)\n"
        "trainer = private_sft(sys.argv[1], privacy=privacy, max_steps=2, per_device_train_batch_size=2)\n"
        "trainer.train()\n"
        "trainer.save_model()\n"
    )
    # Accelerate starts several processes by this flag alone; the script says use_cpu.
    how = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip
    launch = [sys.executable, "-m", "accelerate.commands.launch", *how, "--main_process_port", "0"]
    done = subprocess.run([*launch, script, tmp_path / "out"], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    ledger = read_ledger(tmp_path / "out" / "ledger.json")
    # Two rows on each of two processes: four of eight people a step.
    assert (ledger["steps"], ledger["expected_batch"], ledger["sampling_rate"]) == (2, 4, 0.5)
    by_hand = theirs(PLDAccountant(), 1.0, 4 / 8, 2).get_epsilon(ledger["delta"])
    assert ledger["epsilon"] == pytest.approx(by_hand, rel=1e-3)
    assert guarantee_beside(tmp_path / "out")["epsilon"] == ledger["epsilon"]
