"""What children of this process make of texts is what this process makes of them."""

import errno
import logging
import os
import random
import signal

import pytest
from tokenizers import NormalizedString, PreTokenizedString, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tightlip
from animals import WORDS
from standins import BigramTable
from tightlip.audit.leakage.words import KnownWords
from tightlip.core import children
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.corpus import encoding, readers
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import tokenize_documents
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.engines import local
from tightlip.engines.local import LocalEngine

draw = random.Random(5)
DOCUMENTS = [
    (
        f"u{draw.randrange(9)}",
        " ".join(draw.choices([*WORDS, "Émile 👩‍👩‍👧"], k=draw.choice([0, 1, 9, 90]))),
    )
    for _ in range(60)
]
TEXTS = [[text] for _, text in DOCUMENTS]
PAIRS = build_tokenizer(open_corpus(DOCUMENTS), kind="bpe", size=300)


@pytest.fixture
def begun(monkeypatch):
    """Two children from the second batch of seven documents on; those that were begun."""
    monkeypatch.setattr(readers, "MAX_BATCH_ROWS", 7)
    monkeypatch.setattr(local, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(LocalEngine, "num_python", 2)
    processes, plain = [], children._Child.__init__

    def begin(self, given):
        plain(self, given)
        processes.append(self._process)

    monkeypatch.setattr(children._Child, "__init__", begin)
    return processes


def files_of(folder, **options):
    tokenize_documents(open_corpus(DOCUMENTS).batches(), PAIRS, folder, **options)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("with_spans", [False, True])
@pytest.mark.parametrize("longest", [encoding.PIECE_CHARACTERS, 30])
def test_the_files_of_tokens_are_the_same(tmp_path, monkeypatch, begun, with_spans, longest):
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", longest)
    elsewhere = files_of(tmp_path / "elsewhere", with_spans=with_spans)
    assert len(begun) == 2
    assert all(process.poll() is not None for process in begun)  # none outlives the work
    monkeypatch.setattr(LocalEngine, "num_python", 1)
    assert elsewhere == files_of(tmp_path / "here", with_spans=with_spans)
    assert len(begun) == 2


@pytest.mark.parametrize("call", ["audit", "extract"])
def test_the_report_is_the_same(tmp_path, monkeypatch, begun, call):
    model = BigramTable(len(PAIRS), 1)
    how = {"top_k": len(PAIRS)} if call == "audit" else {"lengths": (2, 5)}

    def files(name):
        out = tmp_path / name
        getattr(tightlip, call)(model, DOCUMENTS, tokenizer=PAIRS, out=out, **how)
        return {path.name: path.read_bytes() for path in out.glob("*.*")}

    elsewhere = files("elsewhere")
    assert len(begun) > 2  # for more than tokens
    monkeypatch.setattr(LocalEngine, "num_python", 1)
    assert files("here") == elsewhere


def test_a_killed_child_changes_nothing(begun, caplog):
    caplog.set_level(logging.WARNING)
    encoder, seen = Encoder(PAIRS), []
    for texts, encoded in LocalEngine().map_python(encoder.end_to_end, TEXTS):
        seen.append(encoded.ids.tolist())
        assert seen[-1] == encoder.end_to_end(texts).ids.tolist()
        if len(seen) == 2:
            os.kill(begun[0].pid, signal.SIGKILL)
            begun[0].wait()
    assert len(seen) == len(TEXTS)
    assert caplog.text.count("A process that read texts has ended") == 1


def test_children_end_with_work_that_is_given_up(begun):
    results = LocalEngine().map_python(Encoder(PAIRS).end_to_end, TEXTS)
    next(results), next(results)
    results.close()
    assert [process.returncode for process in begun] == [-signal.SIGKILL] * 2


def test_children_end_with_a_call_whose_error_is_kept(begun, tmp_path):
    def full(ids, sizes):
        if begun:
            raise OSError("no room")

    with pytest.raises(OSError, match="no room") as kept:
        files_of(tmp_path / "tokens", also=full)
    assert begun
    assert all(process.returncode == -signal.SIGKILL for process in begun)
    assert kept.tb


@pytest.mark.parametrize("num_there_is_room_for", [0, 1])
def test_where_no_more_processes_are_allowed_fewer_do_it(num_there_is_room_for, begun, monkeypatch):
    plain = children.begin_child

    def refused(module, **environment):
        if len(begun) >= num_there_is_room_for:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return plain(module, **environment)

    monkeypatch.setattr(children, "begin_child", refused)
    encoder = Encoder(PAIRS)
    read = LocalEngine().map_python(encoder.end_to_end, TEXTS)
    for texts, encoded in read:
        assert encoded.ids.tolist() == encoder.end_to_end(texts).ids.tolist()
    assert len(begun) == num_there_is_room_for


def test_an_error_in_a_child_is_raised_here(begun, caplog):
    read = LocalEngine().map_python(KnownWords({"a": 1}, 0), [["a b"], ["a"], None, ["a"]])
    assert [next(read)[1][0].tolist() for _ in range(2)] == [[1, 0], [1]]
    with pytest.raises(TypeError, match="not iterable"):
        next(read)
    assert begun
    assert not caplog.text


def test_text_that_changes_under_way_is_refused(monkeypatch, begun):
    plain = readers.Corpus.batches
    asked = []

    def changed(self):
        asked.append(self)
        for number, batch in enumerate(plain(self)):
            if len(asked) > 1 and number == 2:
                batch.texts[0] += " and more"
            yield batch

    monkeypatch.setattr(readers.Corpus, "batches", changed)
    with pytest.raises(UsageError, match="changed while it was audited"):
        tightlip.audit(BigramTable(len(PAIRS), 1), DOCUMENTS, tokenizer=PAIRS, top_k=len(PAIRS))
    assert begun


class Apart:
    """A part of a tokenizer that is Python, which no other process can be handed."""

    def pre_tokenize(self, text: PreTokenizedString):
        text.split(lambda _, part: NormalizedString.split(part, " ", "removed"))


def test_a_tokenizer_with_parts_in_python_stays_here(begun):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, WORDS[0]: 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(backend.model), unk_token="[UNK]"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Apart())
    read = LocalEngine().map_python(Encoder(tokenizer).end_to_end, TEXTS)
    num_known = sum(int(encoded.ids.sum()) for _, encoded in read)
    assert num_known == sum(text.split(" ").count(WORDS[0]) for _, text in DOCUMENTS)
    assert not begun


@pytest.mark.parametrize("given", [{"mixed": True}, {"address": "somewhere:1"}])
def test_what_only_a_cluster_has_is_refused_without_one(given):
    with pytest.raises(UsageError, match=r"Give engine=.ray. too"):
        EngineSettings(**given)
    EngineSettings(**given, engine="ray")
