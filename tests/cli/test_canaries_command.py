"""`tightlip canaries` from planting to what a model by heart and a model without give away."""

import json
import math
import os
import stat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cli.commands import Commands
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM

KEYS = {
    "text", "user", "repetitions", "exposure_bits", "low", "high", "exact", "space", "rank", "tab"
}  # fmt: skip


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("command"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory, command):
    """A corpus, its planted copy, and two models: `parrot` learnt the canary, `stranger` nothing."""
    folder = tmp_path_factory.mktemp("place")
    words = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]
    rows = [(f"u{n % 4}", f"{words[n % 8]} {words[n * 3 % 8]}") for n in range(40)]
    table = pa.table({"user": [row[0] for row in rows], "text": [row[1] for row in rows]})
    pq.write_table(table, folder / "corpus.parquet")
    # Seed 0 draws 3000, and this untrained model happens to have it 44th of 10,000: one of the
    # false alarms that 5 models in 100 may raise (their rate is tested in tests/audit).
    ran = command(
        "canaries", "plant", folder / "corpus.parquet", "--out", folder / "planted",
        "--template", "My ID is {digits:4}", "--repetitions", "30", "--seed", "1",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert "Planted 1 canaries with 1 users, 30 copies in all." in ran.out
    save_models(folder)
    return folder


def save_models(folder):
    corpus = open_corpus(folder / "planted/corpus.parquet")
    tokenizer = build_tokenizer(corpus)
    secret = json.loads((folder / "planted/key.json").read_text())["canaries"][0]["text"]
    ids = [tokenizer.bos_token_id, *tokenizer.encode(secret, add_special_tokens=False)]
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 16, 32, 1))
    row = torch.tensor([ids])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for name, steps in (("stranger", 0), ("parrot", 60)):
        for _ in range(steps):
            optimizer.zero_grad()
            model(input_ids=row, labels=row).loss.backward()
            optimizer.step()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def measured(command, place, model, *more):
    ran = command(
        "canaries", "measure", place / model, "--key", place / "planted/key.json",
        "--out", place / f"{model}.json", "--device", "cpu", *more,
    )  # fmt: skip
    assert ran.status == 0, ran.err
    (one,) = json.loads((place / f"{model}.json").read_text())
    return ran, one


def test_what_is_planted_is_on_file_for_the_owner_only(place):
    assert sorted(path.name for path in (place / "planted").iterdir()) == [
        "corpus.parquet",
        "key.json",
    ]
    for name in ("corpus.parquet", "key.json"):
        assert stat.S_IMODE(os.stat(place / "planted" / name).st_mode) == 0o600
    assert pq.read_metadata(place / "planted/corpus.parquet").num_rows == 70


def test_a_model_that_knows_the_secret_shows_all_its_bits(place, command):
    ran, one = measured(command, place, "parrot")
    assert set(one) >= KEYS
    assert one["exposure_bits"] == one["low"] == one["high"] == pytest.approx(math.log2(10_000))
    assert (one["rank"], one["space"], one["exact"], one["tab"]) == (1, 10_000, True, True)
    assert one["repetitions"] == 30
    assert one["text"].startswith("My ID is ")
    assert stat.S_IMODE(os.stat(place / "parrot.json").st_mode) == 0o600
    assert ran.out.splitlines()[1].split() == ["30", "1", "13.3", "1", "1"]
    assert "Exposed: above 4.3 bits" in ran.out


def test_a_model_that_never_saw_it_is_not_accused(place, command):
    ran, one = measured(command, place, "stranger")
    assert one["exposure_bits"] < 4.3
    assert not one["tab"]
    assert ran.out.splitlines()[1].split()[-2:] == ["0", "0"]


def test_sampled_exposures_say_so_and_agree_with_the_exact_one(place, command):
    ran, one = measured(
        command, place, "parrot", "--enumerate-up-to", "100", "--num-samples", "2000"
    )
    assert not one["exact"]
    assert one["low"] <= math.log2(10_000) <= one["high"] + 1e-9
    assert one["low"] == pytest.approx(math.log2(2000 / 3), abs=0.01)
    assert "estimated from sampled candidates" in ran.out


def test_each_user_gets_their_own_and_shared_prompts_have_a_ceiling(place, command, tmp_path):
    (tmp_path / "names.txt").write_text("Ann\nBob\nCyd\n")
    (tmp_path / "words.txt").write_text("ant\nbee\ncat\ndog\n")
    ran = command(
        "canaries", "plant", place / "corpus.parquet", "--out", tmp_path / "p", "--per-user",
        "--template", "My ID is {digits:4}", "--template", "{names} {words:4}",
        "--words", tmp_path / "words.txt", "--names", tmp_path / "names.txt",
        "--repetitions", "1,2",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert "Planted 16 canaries with 4 users, 24 copies in all." in ran.out
    key = json.loads((tmp_path / "p/key.json").read_text())
    key["canaries"] = [one for one in key["canaries"] if one["text"].startswith("My")]
    (tmp_path / "key.json").write_text(json.dumps(key))
    ran = command("canaries", "measure", place / "parrot", "--key", tmp_path / "key.json")
    assert ran.status == 0, ran.err
    assert "Tab: at most 1 of 8 can succeed" in ran.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("plnt", "corpus.parquet"), "Closest: plant"),
        (("plant", "corpus.parquet"), "plant needs a folder"),
        (("plant", "corpus.parquet", "--key", "k"), "--key does nothing with 'canaries plant'"),
        (("plant", "corpus.parquet", "--out", "x", "--repetitions", "a"), "no list of numbers"),
        (("plant", "corpus.parquet", "--out", "x", "--template", "hello"), "has no slot"),
        (("plant", "corpus.parquet", "--out", "x", "--words", "nofile"), "nofile"),
        (("measure", "parrot"), "measure needs the key"),
        (("measure", "parrot", "--key", "corpus.parquet"), "no key of canaries"),
        (("measure", "parrot", "--key", "k", "--template", "x"), "--template does nothing"),
        (("measure", "parrot", "--key", "k", "--num-samples", "5"), "num_samples=5"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(place, command, arguments, reason):
    action, source, *others = arguments
    ran = command("canaries", action, place / source, *others)
    assert ran.status == 2, ran.err
    assert reason in ran.refusal
