"""`tightlip canaries` from planting to what a model by heart and a model without give away."""

import json
import math
import os
import stat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tightlip
from tightlip.cli.canaries import canary_lines, canary_tables
from tightlip.core.files import names_in, read_sealed
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM

pytestmark = pytest.mark.slow

KEYS = {
    "text", "user", "repetitions", "exposure_bits", "low", "high", "exact", "space", "rank", "tab",
    "kind", "template", "prompt", "perplexity", "num_samples", "fit_ks",
    "token_ids", "num_prompt_tokens",
}  # fmt: skip


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
    assert sorted(names_in(place / "planted")) == [
        "corpus.parquet",
        "key.json",
    ]
    for name in ("corpus.parquet", "key.json"):
        assert stat.S_IMODE(os.stat(place / "planted" / name).st_mode) == 0o600
    assert pq.read_metadata(place / "planted/corpus.parquet").num_rows == 70


def test_a_model_that_knows_the_secret_shows_all_its_bits(place, command):
    ran, one = measured(command, place, "parrot")
    assert set(one) == KEYS
    assert one["exposure_bits"] == one["low"] == one["high"] == pytest.approx(math.log2(10_000))
    assert (one["rank"], one["space"], one["exact"], one["tab"]) == (1, 10_000, True, True)
    assert one["repetitions"] == 30
    assert one["text"].startswith("My ID is ")
    assert stat.S_IMODE(os.stat(place / "parrot.json").st_mode) == 0o600
    assert ran.out.splitlines()[1].split() == ["30", "1", "13.3", "13.3", "to", "13.3", "1", "1"]
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
    key, _ = read_sealed(tmp_path / "p/key.json")
    key["canaries"] = [one for one in key["canaries"] if one["text"].startswith("My")]
    (tmp_path / "key.json").write_text(json.dumps(key))
    ran = command("canaries", "measure", place / "parrot", "--key", tmp_path / "key.json")
    assert ran.status == 0, ran.err
    assert "Tab: at most 1 of 8 can succeed" in ran.out


def test_real_texts_are_chosen_with_one_run_and_measured_on_another(place, command, tmp_path):
    for seed in ("1", "2"):
        ran = command(
            "train", place / "planted/corpus.parquet", "--out", tmp_path / seed, "--split", "none",
            "--steps", "3", "--hidden-size", "8", "--seed", seed, "--device", "cpu",
        )  # fmt: skip
        assert ran.status == 0, ran.err
    choose = ("canaries", "choose", tmp_path / "1", "--out", tmp_path / "real.json")
    more = ("--key", place / "planted/key.json", "--device", "cpu", "--min-tokens", "2")
    ran = command(*choose, *more)
    assert ran.status == 0, ran.err
    assert "Chosen: of 4 users" in ran.out
    assert stat.S_IMODE(os.stat(tmp_path / "real.json").st_mode) == 0o600
    keys = ("--key", place / "planted/key.json", "--key", tmp_path / "real.json")
    ran = command("canaries", "measure", tmp_path / "2", *keys, "--out", tmp_path / "found.json")
    assert ran.status == 0, ran.err
    assert [one["kind"] for one in json.loads((tmp_path / "found.json").read_text())] == [
        "planted", *["real"] * 4
    ]  # fmt: skip
    assert "median perplexity" in ran.out
    assert "of 1 planted canaries are completed" in ran.out
    assert "of 4 real canaries are completed" in ran.out
    ran = command("canaries", "measure", tmp_path / "1", *keys)
    assert ran.status == 2
    assert "the choice flatters it" in ran.refusal


def entry(text, **more):
    """A canary known by heart, of two digits unless told otherwise."""
    bits = math.log2(95)
    return {
        "text": text, "user": "u", "repetitions": 1, "kind": "planted", "exposure_bits": bits, "low": bits, "high": bits,
        "exact": True, "space": 95, "rank": 1, "num_samples": None, "tab": False, "prompt": text.split()[0],
        "perplexity": 1.0, "fit_ks": None, "template": "PIN {digits:2}",
    } | more  # fmt: skip


def cells(table):
    return [[str(cell) for cell in column.cells] for column in table.columns]


def test_what_cannot_be_shown_is_no_zero_in_the_table():
    found = [entry(f"PIN {number}") for number in range(10, 16)]
    table, _ = canary_tables(found)
    assert cells(table)[4] == ["cannot show"]
    assert (
        "Exposure of 'PIN {digits:2}' cannot be shown: a canary known by heart has 6.6 bits here, and more than 6.9 are "
        "needed. Plant fewer canaries, or use larger slots." in canary_lines(found)
    )
    table, _ = canary_tables(
        [*found, entry("ID 1", space=10_000, low=13.0, template="ID {digits:4}")]
    )
    assert cells(table)[4] == ["1 of 1"]
    table, _ = canary_tables(found[:2])
    assert cells(table)[4] == ["2"]
    assert not any("cannot be shown" in line for line in canary_lines(found[:2]))


def test_too_few_samples_are_told_from_too_small_a_space():
    large = {"exact": False, "space": 10**9, "fit_ks": 0.01, "low": 8.4, "template": "{digits:9}"}
    found = [entry(f"{n} {n}", num_samples=1000, **large) for n in range(40)]
    table, _ = canary_tables(found)
    assert cells(table)[4] == ["cannot show"]
    (line,) = [line for line in canary_lines(found) if "cannot be shown" in line]
    assert "Measure with --num-samples 3,800." in line


def test_the_ceiling_counts_equal_texts_and_texts_that_begin_others():
    texts = ["ant bee", "ant bee", "ant bee cat", "ant cat", "dog hen"]
    found = [entry(text, tab=text.startswith("ant bee")) for text in texts]
    lines = canary_lines(found)
    assert "Tab: 3 of 5 planted canaries are completed." in lines
    assert any(line.startswith("Tab: at most 4 of 5 can succeed") for line in lines)


def test_planting_warns_of_canaries_that_can_never_be_exposed(place, command, tmp_path):
    ran = command(
        "canaries", "plant", place / "corpus.parquet", "--out", tmp_path / "p",
        "--template", "PIN {digits:2}", "--repetitions", "1,1,1,1,1,1",
    )  # fmt: skip
    assert ran.status == 0
    assert "'PIN {digits:2}' can never be shown" in " ".join(ran.err.split())


FLAGS = {
    "--template": ("{digits:2}", {"plant"}),
    "--repetitions": ("1", {"plant"}),
    "--per-user": (None, {"plant"}),
    "--words": ("w", {"plant"}),
    "--names": ("n", {"plant"}),
    "--num-words": ("1000", {"plant"}),
    "--user-column": ("user", {"plant"}),
    "--text-column": ("text", {"plant"}),
    "--bad-rows": ("error", {"plant"}),
    "--min-tokens": ("5", {"choose"}),
    "--enumerate-up-to": ("1000000", {"measure"}),
    "--num-samples": ("20000", {"measure"}),
    "--prompt-tokens": ("1", {"measure"}),
    "--key": ("k", {"choose", "measure"}),
    "--device": ("auto", {"choose", "measure"}),
    "--seed": ("0", {"plant", "measure"}),
}


@pytest.mark.parametrize("action", ["plant", "choose", "measure"])
def test_each_action_lists_its_own_flags_and_refuses_others(place, command, action):
    listed = command("canaries", action, "--help").out
    for flag, (value, actions) in FLAGS.items():
        assert (f"{flag} " in listed) == (action in actions), flag
        if action not in actions:
            given = [flag] if value is None else [flag, value]
            ran = command("canaries", action, place / "corpus.parquet", "--out", "x", *given)
            assert ran.status == 2, ran.err
            assert f"No such option: {flag}" in ran.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("plant", "nothing.parquet", "--out", "x"), "nothing.parquet does not exist"),
        (("plant", "corpus.parquet", "--out", "x", "--repetitions", "a"), "not a list of ints"),
        (("plant", "corpus.parquet", "--out", "x", "--template", "hello"), "has no slot"),
        (("plant", "corpus.parquet", "--out", "x", "--words", "nofile"), "nofile"),
        (("choose", "parrot", "--out", "x"), "is not a tightlip run"),
        (("measure", "parrot"), "measure needs the key"),
        (("measure", "parrot", "--key", "pyproject.toml"), "never was a key of canaries"),
        (("measure", "parrot", "--key", ".", "--num-samples", "5"), "num_samples=5"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(place, command, arguments, reason):
    action, source, *others = arguments
    ran = command("canaries", action, place / source, *others)
    assert ran.status == 2, ran.err
    assert reason in ran.refusal


def test_a_file_given_by_mistake_as_a_key_is_not_quoted(place, command):
    ran = command("canaries", "measure", place / "parrot", "--key", place / "corpus.parquet")
    assert ran.status == 2
    assert "If it never was a key of canaries" in ran.refusal
    assert len(ran.err) < 400


@pytest.mark.parametrize("kind", ["a prepared corpus", "a run"])
def test_canaries_are_not_planted_in_folders_with_held_out_text(kind, place, command, tmp_path):
    prepared, run = tmp_path / "prepared", tmp_path / "run"
    assert command("prepare", place / "corpus.parquet", "--out", prepared).status == 0
    if kind == "a run":
        (run).mkdir()
        (run / "config.toml").write_text('[corpus]\nfolder = "../prepared"\n', encoding="utf-8")
    ran = command(
        "canaries", "plant", run if kind == "a run" else prepared, "--out", tmp_path / "x",
        "--template", "{digits:4}",
    )  # fmt: skip
    assert ran.status == 2
    assert kind.split()[-1] in ran.refusal
    assert "train.parquet" in ran.refusal
    assert not (tmp_path / "x").exists()


def test_absurd_numbers_of_copies_are_refused(place, command, tmp_path):
    ran = command(
        "canaries", "plant", place / "corpus.parquet", "--out", tmp_path / "x",
        "--template", "{digits:4}", "--repetitions", "1,1000000000",
    )  # fmt: skip
    assert ran.status == 2
    assert "1,000,000,001 copies" in ran.refusal


def test_a_run_that_never_saw_the_canaries_is_said_to_be_one(place, command, tmp_path):
    run = tmp_path / "run"
    trained = command(
        "train", place / "corpus.parquet", "--out", run, "--steps", "1", "--hidden-size", "4",
        "--embedding-size", "4", "--split", "none",
    )  # fmt: skip
    assert trained.status == 0, trained.err
    tightlip.plant_canaries(
        place / "corpus.parquet",
        tmp_path / "planted",
        templates=["ant {digits:2}"],
        repetitions=[3],
    )
    ran = command("canaries", "measure", run, "--key", tmp_path / "planted/key.json")
    assert ran.status == 0, ran.err
    assert "None of the 1 planted canaries stands in the run's training text" in ran.err


def test_the_table_shows_intervals_and_whose_canaries_are_known_best(place, command):
    ran = command("canaries", "measure", place / "parrot", "--key", place / "planted/key.json")
    assert ran.status == 0, ran.err
    assert "lowest to highest" in ran.out
    owner = json.loads((place / "planted/key.json").read_text())["canaries"][0]["user"]
    (line,) = [line for line in ran.out.splitlines() if line.split()[:1] == [owner]]
    assert line.split()[-1] == "yes"
