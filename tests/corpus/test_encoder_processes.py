"""Texts encoded in other processes are what encoding them here gives."""

import logging
import os
import random
import signal

import pytest
from tokenizers import NormalizedString, PreTokenizedString, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from animals import WORDS
from tightlip.corpus import encoder_processes, encoding, readers
from tightlip.corpus.encoder_processes import encoded_batches
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import tokenize_documents
from tightlip.corpus.vocabulary import build_tokenizer

draw = random.Random(5)
DOCUMENTS = [
    (
        f"u{draw.randrange(9)}",
        " ".join(draw.choices([*WORDS, "Émile 👩‍👩‍👧"], k=draw.choice([0, 1, 9, 90]))),
    )
    for _ in range(60)
]
PAIRS = build_tokenizer(open_corpus(DOCUMENTS), kind="bpe", size=300)


@pytest.fixture
def begun(monkeypatch):
    """Two processes from the second batch of seven documents on; those that were begun."""
    monkeypatch.setattr(readers, "MAX_BATCH_ROWS", 7)
    monkeypatch.setattr(encoder_processes, "FROM_CHARACTERS", 1)
    monkeypatch.setattr(encoder_processes, "num_processes", lambda: 2)
    processes, plain = [], encoder_processes._EncoderProcess.__init__

    def begin(self, state):
        plain(self, state)
        processes.append(self._process)

    monkeypatch.setattr(encoder_processes._EncoderProcess, "__init__", begin)
    return processes


def files_of(folder, tokenizer, **options):
    tokenize_documents(open_corpus(DOCUMENTS).batches(), tokenizer, folder, **options)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("with_spans", [False, True])
@pytest.mark.parametrize("longest", [encoding.PIECE_CHARACTERS, 30])
def test_the_files_are_the_same(tmp_path, monkeypatch, begun, with_spans, longest):
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", longest)
    elsewhere = files_of(tmp_path / "elsewhere", PAIRS, with_spans=with_spans)
    assert len(begun) == 2
    assert all(process.poll() is not None for process in begun)  # none outlives the work
    monkeypatch.setattr(encoder_processes, "num_processes", lambda: 1)
    assert elsewhere == files_of(tmp_path / "here", PAIRS, with_spans=with_spans)
    assert len(begun) == 2


def test_a_killed_process_changes_nothing(begun, caplog):
    caplog.set_level(logging.WARNING)
    encoder, seen = Encoder(PAIRS), []
    for batch, encoded in encoded_batches(open_corpus(DOCUMENTS).batches(), encoder):
        seen.append(encoded.ids.tolist())
        assert seen[-1] == encoder.end_to_end(batch.texts).ids.tolist()
        if len(seen) == 2:
            os.kill(begun[0].pid, signal.SIGKILL)
            begun[0].wait()
    assert len(seen) == 9
    assert caplog.text.count("A process that encoded texts has ended") == 1


def test_processes_end_with_work_that_is_given_up(begun):
    batches = encoded_batches(open_corpus(DOCUMENTS).batches(), Encoder(PAIRS))
    next(batches), next(batches)
    batches.close()
    assert [process.returncode for process in begun] == [-signal.SIGKILL] * 2


class Apart:
    """A part of a tokenizer that is Python, which no other process can be handed."""

    def pre_tokenize(self, text: PreTokenizedString):
        text.split(lambda _, part: NormalizedString.split(part, " ", "removed"))


def test_a_tokenizer_with_parts_in_python_stays_here(tmp_path, begun):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, WORDS[0]: 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Apart())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(backend.model), unk_token="[UNK]"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = backend.pre_tokenizer
    encoder = Encoder(tokenizer)
    found = [
        encoded.ids.tolist()
        for _, encoded in encoded_batches(open_corpus(DOCUMENTS).batches(), encoder)
    ]
    assert sum(map(sum, found)) == sum(text.split(" ").count(WORDS[0]) for _, text in DOCUMENTS)
    assert not begun
