"""What a run is still said to promise once its own canaries have contradicted it: nothing, anywhere."""

import json
import shutil

import pytest

import tightlip
from tightlip.audit.compared import gated
from tightlip.audit.dp_check import check_run
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import guarantee_words
from tightlip.core.files import read_sealed, write_sealed
from tightlip.core.register import guarantee_beside
from tightlip.core.run_folder import open_run
from tightlip.privacy import private_training
from tightlip.privacy.noise_schedules import CPUNoise
from tightlip.training.starting import take_back
from training.small_corpora import documents, other_peoples_documents

pytestmark = pytest.mark.slow

SETTINGS = {
    "model": "gru",
    "embedding_size": 4,
    "hidden_size": 4,
    "num_layers": 1,
    "mitigation": "dp",
    "noise_multiplier": 2.0,
    "batch_size": 8,
    "sequence_length": 10,
}
ENGINE = "_private_dp_check.json"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    made = tightlip.prepare(other_peoples_documents(), tmp_path_factory.mktemp("p") / "p")
    return {"tokenizer": str(made.tokenizer_folder), "split": "document"}


def trained(words, folder, **settings):
    rows = documents(num_documents=120, num_users=40)
    return tightlip.train(rows, folder, prepare=words, **(settings or SETTINGS | {"steps": 6}))


@pytest.fixture
def contradicted(words, tmp_path, monkeypatch):
    """A run with a tenth of the noise, a copy of it and a report of it from before the check."""
    honest = CPUNoise.add

    def quieter(self, tensors, *, scale, **amounts):
        honest(self, tensors, scale=scale / 10, **amounts)

    with monkeypatch.context() as patched:
        patched.setattr(CPUNoise, "add", quieter)
        run = trained(words, tmp_path / "run", **SETTINGS, steps=6, dp_check_engine=1000)
    assert run.guarantee["standing"] == "proved"
    shutil.copytree(run.folder, tmp_path / "copy")
    tightlip.audit(run.folder, out=tmp_path / "report")
    assert check_run(run.folder, take_back, device="cpu").verdict == "contradicted"
    return run.folder


def test_nothing_that_reads_the_run_shows_its_guarantee(contradicted, tmp_path, command):
    shown = json.loads(command("ledger", contradicted, "--json").out)
    assert shown["standing"] == shown["people"]["standing"] == "measured only"
    assert [value for name, value in shown.items() if name.startswith("epsilon")] == [None] * 4
    assert shown["people"]["epsilon"] is shown["another_1000_steps"] is None
    assert shown["withdrawn"]["standing"] == "proved"
    assert shown["withdrawn"]["engine"]["verdict"] == "contradicted"
    assert "contradict its ε" in command("ledger", contradicted).out
    card = (contradicted / "model/README.md").read_text()
    assert "proved" not in card.lower()
    assert "Differentially private" not in card
    assert guarantee_beside(contradicted / "model")["epsilon"] is None
    report = tightlip.audit(contradicted, out=tmp_path / "again")
    assert guarantee_words(report.summary["guarantee"]).value == "none"
    assert "guarantee: proved" not in (tmp_path / "again/report.html").read_text()
    made = tightlip.compare([contradicted, tmp_path / "report"], out=tmp_path / "compared")
    assert [row["guarantee"]["standing"] for row in made.rows] == ["measured only"] * 2
    assert all(figures["epsilon"] is None for figures in gated(made.rows).values())


def test_a_copy_from_before_and_a_deleted_finding_do_not_bring_it_back(
    contradicted, tmp_path, words, monkeypatch
):
    (contradicted / "dp_check_result.json").unlink()
    for run in (contradicted, tmp_path / "copy"):
        assert open_run(run).guarantee["standing"] == "measured only"
        assert tightlip.ledger(run)["epsilon"] is None
    assert guarantee_beside(tmp_path / "copy/model")["epsilon"] is None
    shutil.rmtree(contradicted)
    people = trained(words, tmp_path / "later").guarantee["people"]
    assert people["epsilon"] is None
    assert "canaries contradict" in people["because"]
    # Elsewhere nobody's register knows: the ledger and the model's own folder do, if copied since.
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "another register"))
    assert open_run(tmp_path / "copy").guarantee["standing"] == "proved"


def test_who_starts_from_the_published_model_has_no_epsilon_for_its_people(
    contradicted, tmp_path, words, monkeypatch
):
    alone = shutil.copytree(contradicted / "model", tmp_path / "published")
    shutil.rmtree(tmp_path / "copy")
    shutil.rmtree(contradicted)
    settings = {**SETTINGS, "steps": 2, "model": str(alone)}
    for name in ("embedding_size", "hidden_size", "num_layers"):
        settings.pop(name)
    with pytest.raises(GuaranteeError, match="without privacy"):
        trained(words, tmp_path / "same", **settings)
    # On other people's text, and where no register knows.
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "another register"))
    rows = [{"user": f"stranger {n}", "text": "cat dog eel fox gnu hen"} for n in range(40)]
    settings["prepare"] = words | {"split": "none"}
    later = tightlip.train(rows, tmp_path / "later", **settings)
    assert later.guarantee["people"]["epsilon"] is None
    assert "no ε for the people" in guarantee_words(later.guarantee).value


def test_no_later_check_changes_what_is_on_record(contradicted, command, tmp_path):
    reason = open_run(contradicted).guarantee["because"]
    (tmp_path / "copy/model/README.md").write_text("My words.\n")
    for run in (contradicted, tmp_path / "copy"):
        assert check_run(run, take_back, device="cpu").on_record == reason
        assert (run / "model/README.md").read_text().count("Measured only") == 1
    assert (tmp_path / "copy/model/README.md").read_text().startswith("My words.\n")
    there, _ = read_sealed(contradicted / ENGINE)
    blind = {"scores": [float(n % 7) for n in range(len(there["scores"]))]}
    write_sealed(contradicted / ENGINE, there | blind)
    ran = command("dp-check", contradicted, "--device", "cpu")
    assert ran.status == 3
    assert "is not contradicted" in ran.out
    assert "was taken back before" in ran.refusal
    found = json.loads((contradicted / "dp_check_result.json").read_text())
    assert found["verdict"] == "consistent"
    assert found["on_record"] == reason
    assert open_run(contradicted).guarantee["standing"] == "measured only"
    (contradicted / ENGINE).unlink()
    with pytest.raises(UsageError, match=r"trained with dp_check_engine=1000, and .* is missing"):
        check_run(contradicted, take_back, device="cpu")


def test_a_promise_that_is_lost_at_the_end_is_lost_for_earlier_snapshots(
    words, tmp_path, monkeypatch
):
    def at_the_end(passes, batches, *, moved):
        return "Two rows meet" if moved else None

    monkeypatch.setattr(private_training, "shared_by_others", at_the_end)
    run = trained(words, tmp_path / "run", **SETTINGS, steps=10)
    assert [one.folder.name for one in run.snapshots] == ["epoch-1", "epoch-2"]
    for folder in (run.model_folder, *(one.folder for one in run.snapshots)):
        told = json.loads((folder / "guarantee.json").read_text())
        assert (told["epsilon"], told["standing"]) == (None, "measured only")
        assert "proved" not in (folder / "README.md").read_text().lower()
