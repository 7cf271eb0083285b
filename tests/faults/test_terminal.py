"""What people wrote never commands the terminal, and no error quotes a row of theirs."""

import csv
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.held_out_runs import documents, make_run, prepared
from faults.cases import write_place
from tightlip.cli import main as cli
from tightlip.core.files import csv_text
from tightlip.core.progress import harmless

NASTY = "[/red]\x1b[2J\x9b31m\u202e<b>"
COMMANDS = ("\x1b", "\x9b", "\u202e")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """A run whose users, further columns and their values are called NASTY."""
    folder = tmp_path_factory.mktemp("nasty")
    rows = [
        {
            "user": f"{row['user']}{NASTY}",
            "text": row["text"],
            f"team{NASTY}": f"{row['team']}{NASTY}",
        }
        for row in documents()
    ]
    return make_run(folder / "run", prepared(folder / "corpus", rows), steps=30)


@pytest.mark.parametrize(
    "words", [("groups",), ("membership",), ("audit",), ("tab", "--prompt", "ant")]
)
def test_names_and_values_of_a_corpus_are_shown_as_text(nasty, command, words, tmp_path):
    name, *others = words
    if name == "audit":
        others = ["--out", tmp_path / f"out{NASTY.replace('/', '')}"]
    ran = command(name, nasty, *others)
    assert ran.status == 0, ran.err
    assert not any(character in ran.out + ran.err for character in COMMANDS)
    if name == "groups":
        assert "red[/red]" in ran.out


def test_labels_and_columns_of_vectors_are_shown_as_text(tmp_path, command):
    rows = [row | {"label": f"{row['team']}{NASTY}", NASTY: "x"} for row in documents()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
    how = ("--label", "label", "--method", "none", "--extractor", "bag", "--epochs", "1")
    made = command("represent", "train", "corpus.parquet", "--out", "run", *how, place=tmp_path)
    assert made.status == 0, made.err
    sent = ("encode", "run/device", "corpus.parquet", "--out", "sent.parquet", "--carry", NASTY)
    made = command("represent", *sent, place=tmp_path)
    assert made.status == 0, made.err
    ran = command("represent", "classify", "run/server", "sent.parquet", place=tmp_path)
    refused = command(
        "represent", "classify", "run/server", "sent.parquet", "--label", "nosuch", place=tmp_path
    )
    assert (ran.status, refused.status) == (0, 2)
    assert not any(character in ran.out + refused.err for character in COMMANDS)


def test_a_path_that_reads_as_markup_fails_no_gate(shared, command, tmp_path):
    place = shared("faults", write_place)
    out = tmp_path / "[/red]"
    ran = command("audit", place / "run", "--out", out, "--fail-on", "unique<0")
    assert ran.status == 0, ran.err
    assert (out / "report.html").exists()


def test_a_headerless_csv_is_refused_without_a_word_of_it(tmp_path, command):
    (tmp_path / "c.csv").write_text("alice,my PIN is 4711\nbob,hello\n")
    ran = command("prepare", tmp_path / "c.csv", "--out", tmp_path / "out")
    assert ran.status == 2
    assert "its first line must name them" in ran.refusal
    assert not any(word in ran.out + ran.err for word in ("alice", "4711", "bob"))


def test_text_that_a_spreadsheet_would_calculate_is_marked_as_text():
    rows = [{"name": value, "n": -3} for value in ("=1+1", "+x", "-x", "@x", "\tx", "plain", "")]
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [row["name"] for row in read] == ["'=1+1", "'+x", "'-x", "'@x", "'\tx", "plain", ""]
    assert {row["n"] for row in read} == {"-3"}


def test_one_is_the_exit_code_of_a_failed_gate_and_of_nothing_else(monkeypatch, capsys):
    def broken():
        raise RuntimeError("a slip of ours")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 70
    assert "a slip of ours" in capsys.readouterr().err


@pytest.mark.parametrize("reader", ["gone", "closed"])
def test_of_several_processes_each_ends_with_its_own_code_though_nobody_reads(reader, monkeypatch):
    def ends():
        raise SystemExit(3)

    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    codes = []
    monkeypatch.setattr(cli, "app", ends)
    monkeypatch.setattr(cli.os, "_exit", codes.append)
    monkeypatch.setattr(cli.atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(cli.sys, "stdout", Gone() if reader == "gone" else None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):  # which the real _exit does not come to
        cli.main()
    assert codes == [3]


def test_a_line_is_one_line():
    assert harmless("a\nb\tc\x07") == "a\ufffdb\tc\ufffd"
