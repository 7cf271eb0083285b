"""`tightlip dp-check` on a model that knows its canaries by heart and one that does not."""

import json
import os
import shutil
import stat

import numpy as np
import pytest
import torch

from animals import WORDS
from tightlip.audit.dp_check import check_run
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import begin_run, write_ledger
from tightlip.corpus.canaries import read_check_key
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.training.batches import Rows, gather
from tightlip.training.recipe import plant, uniform
from tightlip.training.starting import take_back

pytestmark = pytest.mark.slow

LEDGER = {"mechanism": "test", "epsilon": 1.0, "delta": 1e-5, "standing": "proved", "because": ""}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with one key: `parrot` was trained on the canaries that are in, `stranger` on none."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = build_tokenizer(open_corpus([("a", " ".join(WORDS))]))
    rows = plant(
        no_rows(tokenizer.bos_token_id),
        80,
        length=8,
        key_file=folder / "dp_check.json",
        draw=uniform(
            np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids), len(tokenizer)
        ),
    )
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 32, 64, 1))
    for name, steps in (("stranger", 0), ("parrot", 120)):
        learn(model, gather(rows, np.arange(len(rows))), steps)
        begin_run(folder / name, {"corpus": {"folder": "corpus"}})
        shutil.copy2(folder / "dp_check.json", folder / name)
        model.save_pretrained(folder / name / "model")
        tokenizer.save_pretrained(folder / name / "model")
        write_ledger(folder / name, LEDGER)
    return folder


def no_rows(bos):
    none = np.zeros(0, np.int64)
    parts = dict.fromkeys(("tokens", "starts", "lengths", "users", "documents"), none)
    return Rows(**parts, begins=none.astype(bool), bos=bos, pad=0)


def learn(model, batch, steps):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=batch.input_ids_BT, labels=batch.labels_BT).loss.backward()
        optimizer.step()


def test_a_claim_that_the_canaries_contradict_exits_3_and_is_on_record(runs, command):
    ran = command("dp-check", runs / "parrot", "--device", "cpu")
    assert ran.status == 3, ran.err
    assert "40 of 40 guesses about 80 canaries were right; 20 would be by chance." in ran.out
    assert "ε is at least 2.55 at δ 1e-05, with 95% confidence." in ran.out
    assert "ε 1.00 at δ 1e-05, is contradicted." in ran.out
    assert "claims ε 1.00, and its canaries contradict that at 95%" in ran.refusal
    written = runs / "parrot/dp_check_result.json"
    assert json.loads(written.read_text())["verdict"] == "contradicted"
    assert stat.S_IMODE(os.stat(written).st_mode) == 0o600


def test_a_model_that_never_saw_them_contradicts_nothing(runs, command):
    ran = command("dp-check", runs / "stranger", "--device", "cpu")
    assert ran.status == 0, ran.err
    assert "ε 1.00 at δ 1e-05, is not contradicted." in ran.out
    found = json.loads((runs / "stranger/dp_check_result.json").read_text())
    assert found["verdict"] == "consistent"
    assert found["text"]["epsilon_lower_bound"] < 1.0
    assert found["engine"] is None


def test_a_run_that_claims_nothing_is_told_what_was_seen(runs, tmp_path):
    shutil.copytree(runs / "parrot", tmp_path / "plain")
    write_ledger(tmp_path / "plain", LEDGER | {"epsilon": None, "delta": None})
    checks = check_run(tmp_path / "plain", take_back, device="cpu")
    assert checks.verdict == "nothing claimed"
    assert checks.text.epsilon_lower_bound > 2.5
    assert checks.text.num_canaries == len(read_check_key(tmp_path / "plain/dp_check.json"))


def test_a_run_without_canaries_or_without_an_end_is_refused(runs, command, tmp_path):
    shutil.copytree(runs / "parrot", tmp_path / "run")
    (tmp_path / "run/dp_check.json").unlink()
    with pytest.raises(UsageError, match="--dp-check-engine 1000"):
        check_run(tmp_path / "run", take_back)
    assert "run was trained without them. Run: " in command("dp-check", tmp_path / "run").refusal
    (tmp_path / "run/ledger.json").unlink()
    with pytest.raises(UsageError, match="not finished"):
        check_run(tmp_path / "run", take_back)
