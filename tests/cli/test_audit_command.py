"""`tightlip audit` as a command: exit codes, messages, being killed, damaged input."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tightlip
from tightlip.core.files import names_in
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM, TransformerConfig, TransformerForCausalLM

pytestmark = pytest.mark.slow

WORDS = ["the", "red", "fox", "ran", "to", "a", "barn", "and", "hid", "ten", "eggs", "by", "night"]
SHARD = 700  # tokens: three shards of the corpus
REPORT = {
    *("sequences.parquet", "owners.parquet", "users.parquet", "summary.json", "report.html"),
    "scan",
}


def text_of(draw, num_words):
    return " ".join(draw.choices(WORDS, k=num_words))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model that is often right, the corpus it is audited on, and a held-out one."""
    folder = tmp_path_factory.mktemp("place")
    draw = random.Random(0)
    documents = [(f"user-{draw.randrange(6)}", text_of(draw, 25)) for _ in range(80)]
    table = pa.table({"user": [u for u, _ in documents], "text": [t for _, t in documents]})
    pq.write_table(table, folder / "corpus.parquet")
    tokenizer = build_tokenizer(open_corpus(documents), size=40)
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 6, 8, 1))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def undisturbed(place, command, tmp_path_factory):
    """The report of an audit nobody interrupted, and how the command went."""
    out = tmp_path_factory.mktemp("undisturbed") / "report"
    ran = command(*the_audit(place, out), shard_tokens=SHARD)
    assert ran.status == 0, ran.err
    return out, ran


def the_audit(place, out):
    return ("audit", place / "model", place / "corpus.parquet", "--out", out, "--top-k", 4)


def same_report(out, undisturbed_out):
    """Byte for byte, and nothing else lies about."""
    for name in ("sequences.parquet", "owners.parquet", "users.parquet", "summary.json"):
        assert (out / name).read_bytes() == (undisturbed_out / name).read_bytes(), name
    assert names_in(out) - {"log.txt"} == REPORT


def test_a_finished_audit_exits_0_and_says_where_the_report_is(undisturbed):
    out, ran = undisturbed
    assert str(out / "report.html") in ran.out
    assert names_in(out) - {"log.txt"} == REPORT
    assert len(ran.scans) == 3
    report = tightlip.open_report(out)
    assert report.unique > 0
    assert report.sequences.num_rows == report.distinct_sequences


def test_the_console_script_fails_a_gate_with_1_and_names_it(place, tmp_path):
    script = Path(sys.executable).with_name("tightlip")
    conditions = ["--fail-on", "unique>0", "--fail-on", "num_users>100"]
    ran = subprocess.run(
        [script, *map(str, the_audit(place, tmp_path / "r")), *conditions],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    unique = tightlip.open_report(tmp_path / "r").unique
    failed = [line for line in ran.stderr.splitlines() if line.startswith("tightlip: ")]
    assert failed == [f"tightlip: failed on unique>0: unique is {unique}"]


def test_gates_that_hold_exit_0(place, command, tmp_path):
    ran = command(*the_audit(place, tmp_path / "r"), "--fail-on", "num_users>6")
    assert ran.status == 0


def test_a_gate_on_what_is_not_known_exits_1(place, command, tmp_path):
    ran = command(*the_audit(place, tmp_path / "r"), "--fail-on", "leakage_epsilon>1e9")
    assert ran.status == 1
    assert ran.refusal == ("tightlip: failed on leakage_epsilon>1e9: leakage_epsilon is not known")


@pytest.mark.parametrize("condition", ["uniqe>0", "unique>", "curated>1"])
def test_a_gate_with_a_typo_exits_2_before_anything_is_done(place, command, tmp_path, condition):
    ran = command(*the_audit(place, tmp_path / "r"), "--fail-on", condition)
    assert ran.status == 2
    assert condition in ran.refusal
    assert not (tmp_path / "r").exists()
    assert not ran.scans


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--top-k", 0), "top_k=0"),
        (("--occurrences", "few"), "'few'"),
        (("--curated-at", "2,three"), "2,three"),
        (("--memory", "lots"), "memory='lots'"),
        (("--dtype", "int3"), "Unknown dtype 'int3'"),
        (("--window", 1), "window=1"),
        (("--device", "abacus"), "Unknown device 'abacus'"),
        (("--engine", "locl"), "Closest: local"),
        (("--bad-rows", "hide"), "Unknown bad_rows 'hide'"),
        (("--validation", "/no/such.parquet"), "/no/such.parquet does not exist"),
        (("--public-model", "/no/such"), "/no/such does not exist"),
        (("--public-model", "leave-out"), "--public-model DIR"),
        (("--snapshots",), "--snapshots needs a run"),
        (("--memory", "1KB"), "--memory"),
    ],
)
def test_flags_that_cannot_work_exit_2_with_one_line(place, command, tmp_path, flags, says):
    ran = command(*the_audit(place, tmp_path / "r"), *flags)
    assert ran.status == 2, ran.err
    assert says in ran.refusal
    assert "Traceback" not in ran.err


# Being killed


def test_killed_before_any_rename_the_same_command_ends_with_the_same_report(
    place, command, undisturbed, tmp_path
):
    undisturbed_out, ran = undisturbed
    edges = ran.scans
    for number in range(1, ran.renames + 1):
        out = tmp_path / f"killed-{number}"
        killed = command(*the_audit(place, out), shard_tokens=SHARD, die_before_rename=number)
        if killed.status == 0 and killed.renames < number:
            break  # numba renames its cache files too, in the first run of a fresh clone only
        assert killed.status == -9
        finished = len(list(out.glob("scan/*/[0-9]*.npz")))
        # Lost are at most the shard that is being written and the next, which is scanned meanwhile.
        assert len(killed.scans) - finished in (0, 1, 2)
        again = command(*the_audit(place, out), shard_tokens=SHARD)
        assert again.status == 0, again.err
        assert again.scans == edges[finished:], "a finished shard was scanned again"
        same_report(out, undisturbed_out)


def test_killed_again_and_again_at_odd_moments_it_still_ends_with_the_same_report(
    place, command, undisturbed, tmp_path
):
    undisturbed_out, ran = undisturbed
    out = tmp_path / "r"
    draw = random.Random(1)
    statuses = []
    for _ in range(4):
        after = draw.uniform(0.2, 0.95) * ran.seconds
        statuses.append(
            command(*the_audit(place, out), shard_tokens=SHARD, kill_after=after).status
        )
    assert -9 in statuses
    assert command(*the_audit(place, out), shard_tokens=SHARD).status == 0
    same_report(out, undisturbed_out)


def test_a_killed_audit_of_another_corpus_is_not_gone_on_with(place, command, tmp_path):
    out = tmp_path / "r"
    other = tmp_path / "other.parquet"
    table = pq.read_table(place / "corpus.parquet")
    pq.write_table(table.slice(0, 60), other)
    model = place / "model"
    killed = command("audit", model, other, "--out", out, shard_tokens=SHARD, die_before_rename=12)
    assert killed.status == -9
    assert list(out.glob("scan/*/[0-9]*.npz"))
    ran = command("audit", model, place / "corpus.parquet", "--out", out, shard_tokens=SHARD)
    assert ran.status == 0
    assert len(ran.scans) == 3
    assert tightlip.open_report(out).num_documents == 80


def test_a_killed_audit_with_another_begin_token_is_not_gone_on_with(place, command, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in (place / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    arguments = ("audit", model, place / "corpus.parquet", "--out", tmp_path / "r")
    assert command(*arguments, shard_tokens=SHARD, die_before_rename=12).status == -9
    assert list((tmp_path / "r").glob("scan/*/[0-9]*.npz"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["bos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = command(*arguments, shard_tokens=SHARD)
    assert ran.status == 0
    assert len(ran.scans) == 3


def test_a_second_audit_replaces_the_first(place, command, undisturbed, tmp_path):
    undisturbed_out, _ = undisturbed
    out = tmp_path / "r"
    assert command("audit", place / "model", place / "corpus.parquet", "--out", out).status == 0
    first = (out / "sequences.parquet").read_bytes()
    (out / "snapshots.json").write_text('{"snapshots": [], "best_validation": null}')
    assert command(*the_audit(place, out)).status == 0
    assert (out / "sequences.parquet").read_bytes() != first
    same_report(out, undisturbed_out)


# Damaged input


def cut_off(path, place):
    whole = (place / "corpus.parquet").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def with_columns(**columns):
    return lambda path, place: pq.write_table(pa.table(columns), path)


def not_utf8(path, place):
    offsets = pa.array([0, 3, 6], pa.int32()).buffers()[1]
    text = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"fox\xff\xfe!"))
    pq.write_table(pa.table({"user": ["a", "b"], "text": text}), path)


def lines(*rows):
    return lambda path, place: path.write_bytes(b"\n".join(rows))


DAMAGED = {
    "cut off": ("c.parquet", cut_off, ["c.parquet", "cut off"]),
    "not what its name says": (
        "c.parquet",
        lambda path, place: path.write_text("user,text\na,b\n"),
        ["c.parquet", "not what its name says"],
    ),
    "empty": ("c.parquet", lambda path, place: path.touch(), ["c.parquet", "no documents"]),
    "empty lines": ("c.jsonl", lines(), ["c.jsonl", "no documents"]),
    "another column": (
        "c.parquet",
        with_columns(author=["a"], text=["the fox"]),
        ["c.parquet", "'user'", "--user-column", "author"],
    ),
    "another text column": (
        "c.parquet",
        with_columns(user=["a"], texts=["the fox"]),
        ["c.parquet", "'text'", "Closest: texts", "--text-column"],
    ),
    "users are floats": (
        "c.parquet",
        with_columns(user=[1.0, 2.0], text=["the fox", "ran"]),
        ["c.parquet", "floating-point", "'user'", "astype"],
    ),
    "texts are numbers": (
        "c.parquet",
        with_columns(user=["a"], text=[12]),
        ["c.parquet", "row 1", "'text'", "--text-column"],
    ),
    "null": (
        "c.parquet",
        with_columns(user=["a", None], text=["the fox", "ran"]),
        ["c.parquet", "row 2", "'user'", "--bad-rows skip"],
    ),
    "not UTF-8": ("c.parquet", not_utf8, ["c.parquet", "row 2", "not UTF-8", "--bad-rows skip"]),
    "lines not UTF-8": (
        "c.jsonl",
        lines(b'{"user": "a", "text": "fox"}', b'{"user": "a", "text": "f\xe9"}'),
        ["c.jsonl", "row 2", "not UTF-8"],
    ),
    "lines cut off": (
        "c.jsonl",
        lines(b'{"user": "a", "text": "fox"}', b'{"user": "a", "te'),
        ["c.jsonl", "row 2", "not JSON"],
    ),
    "unknown words": (
        "c.parquet",
        with_columns(user=["a"], text=["zzz qqq"]),
        ["knows none of the corpus' words"],
    ),
    "no such ending": ("c.txt", lambda path, place: path.write_text("fox"), ["c.txt", ".parquet"]),
    "not there": ("c.parquet", lambda path, place: None, ["c.parquet", "does not exist"]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_corpus_exits_2_with_one_line_that_names_it(damage, place, command, tmp_path):
    name, make, says = DAMAGED[damage]
    make(tmp_path / name, place)
    out = tmp_path / "r"
    ran = command("audit", place / "model", tmp_path / name, "--out", out)
    assert ran.status == 2, ran.err
    for words in says:
        assert words in ran.refusal
    assert "Traceback" not in ran.err
    assert not list(tmp_path.rglob("*.partial"))
    if damage != "unknown words":  # there, the tokens stay for the next attempt
        assert not out.exists()


def test_bad_rows_may_be_skipped(place, command, tmp_path):
    not_utf8(tmp_path / "c.parquet", place)
    out = tmp_path / "r"
    ran = command(
        "audit", place / "model", tmp_path / "c.parquet", "--out", out, "--bad-rows", "skip"
    )
    assert ran.status == 0, ran.err
    assert tightlip.open_report(out).num_documents == 1


def without(*names):
    def make(folder, place):
        folder.mkdir()
        for path in (place / "model").iterdir():
            if path.name not in names:
                (folder / path.name).write_bytes(path.read_bytes())

    return make


def with_half_the_weights(folder, place):
    without()(folder, place)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


BROKEN_MODELS = {
    "not there": (lambda folder, place: None, ["does not exist", "a GGUF file"]),
    "a file": (lambda folder, place: folder.touch(), ["is not a folder"]),
    "empty": (lambda folder, place: folder.mkdir(), ["no config.json"]),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), ["has no tokenizer"]),
    "no weights": (without("model.safetensors"), ["no model.safetensors"]),
    "half the weights": (with_half_the_weights, ["not a whole safetensors file"]),
}


@pytest.mark.parametrize("fault", BROKEN_MODELS)
def test_a_broken_model_exits_2_with_one_line_that_names_it(fault, place, command, tmp_path):
    make, says = BROKEN_MODELS[fault]
    make(tmp_path / "broken", place)
    out = tmp_path / "r"
    ran = command("audit", tmp_path / "broken", place / "corpus.parquet", "--out", out)
    assert ran.status == 2, ran.err
    for words in (str(tmp_path / "broken"), *says):
        assert words in ran.refusal
    assert not out.exists()


def test_an_out_folder_that_is_a_file_exits_2_and_leaves_it_alone(place, command, tmp_path):
    (tmp_path / "r").write_text("mine")
    ran = command(*the_audit(place, tmp_path / "r"))
    assert ran.status == 2
    assert "r is a file. Give --out a folder." in ran.refusal
    assert (tmp_path / "r").read_text() == "mine"


def test_an_out_folder_inside_a_file_exits_2(place, command, tmp_path):
    (tmp_path / "f").write_text("mine")
    ran = command(*the_audit(place, tmp_path / "f" / "r"))
    assert ran.status == 2
    assert str(tmp_path / "f") in ran.refusal
    assert "Traceback" not in ran.err


def test_without_out_a_plain_model_exits_2(place, command):
    ran = command("audit", place / "model", place / "corpus.parquet")
    assert ran.status == 2
    assert "--out DIR" in ran.refusal


def test_without_a_corpus_a_plain_model_exits_2(place, command, tmp_path):
    ran = command("audit", place / "model", "--out", tmp_path / "r")
    assert ran.status == 2
    assert "tightlip audit MODEL CORPUS" in ran.refusal


def test_a_document_of_five_megabytes_is_audited(command, tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=24)) for _ in range(60)]
    text = " ".join(draw.choices(words, k=205_000))
    assert len(text) > 5_000_000
    table = pa.table({"user": ["ann", "bob"], "text": [text, words[0]]})
    pq.write_table(table, tmp_path / "c.parquet")
    tokenizer = build_tokenizer(open_corpus([("a", " ".join(words))]), size=80)
    torch.manual_seed(0)
    model = TransformerForCausalLM(TransformerConfig(len(tokenizer), 8, 1, 1, 256))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ran = command("audit", tmp_path / "model", tmp_path / "c.parquet", "--out", tmp_path / "r")
    assert ran.status == 0, ran.err
    report = tightlip.open_report(tmp_path / "r")
    assert report.num_tokens == 205_001
    # A model of random weights is right about as often as any guess.
    assert 0.5 / 60 < report.accuracy < 2 / 60
    assert report.perplexity == pytest.approx(len(tokenizer), rel=0.3)
