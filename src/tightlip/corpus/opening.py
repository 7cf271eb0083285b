"""Corpora as later stages open them, and the text a run learnt from: is it still that text?"""

import shutil
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.checksums import LIST
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import read_json, write_json
from tightlip.core.run_folder import RunRecord, is_run, open_run, run_around
from tightlip.corpus import tokens
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.formats import files_of
from tightlip.corpus.history import marks_behind, marks_of, name_of, origin_of
from tightlip.corpus.prepare import PreparedCorpus, is_prepared, open_prepared
from tightlip.corpus.prepare_chats import check_plain, refuse_rendered
from tightlip.corpus.prepare_config import TextSettings
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.rendered import RolesReader, ShownTexts
from tightlip.corpus.tokens import TokenizedCorpus

MOST_SHARED = 0.5  # short common texts stand in any two corpora
# What a reference may have learnt, and how every score beside it then is.
_KNOWN_TO_IT = {"members": ("training", "low"), "held_out": ("held-out", "high")}
_PARTS = {
    "corpus_fingerprint": "training text",
    "validation_fingerprint": "held-out text",
    "tokenizer_fingerprint": "tokenizer",
}


@dataclass(frozen=True)
class CorpusSource:
    """A path, table, frame or list, and how to read it. `FOLDER/validation` of a prepared
    corpus is its held-out part."""

    source: Any
    columns: dict[str, Any]

    @property
    def path(self) -> Path | None:
        return Path(self.source) if isinstance(self.source, str | Path) else None

    @property
    def _stored_part(self) -> tuple[Path, str] | None:
        """The prepared corpus that the path names, and whether all of it or its held-out part."""
        if self.path is None:
            return None
        if self.path.name == "validation" and is_prepared(self.path.parent):
            return self.path.parent, "validation"
        return (self.path, "train") if is_prepared(self.path) else None

    def existing(self) -> "CorpusSource":
        """Itself; refused where nothing is at its path, or only what a template made of chats."""
        if self.path is not None and not files_of(self.source):
            raise UsageError(f"{self.source} does not exist. Give the path of a corpus.")
        if self._stored_part is None:
            refuse_rendered(self.source)
        return self

    def prepared(self) -> TokenizedCorpus | None:
        """The tokens stored with a prepared corpus."""
        if self._stored_part is None:
            return None
        folder, part = self._stored_part
        prepared = open_prepared(folder)
        return prepared.train if part == "train" else prepared.validation

    def documents(self) -> Any:
        if self._stored_part is None:
            return open_corpus(self.source, **self.columns)
        folder, part = self._stored_part
        return open_corpus(folder / f"{part}.parquet")

    def shown_to(self, tokenizer: Any) -> Any:
        """The documents as texts, as a model with this tokenizer is shown them; None where they are
        tokens and nobody knows the text."""
        documents = self.documents()
        if documents.format == "text":
            return documents
        settings = TextSettings(**self.columns)
        return None if documents.format == "tokens" else ShownTexts(documents, tokenizer, settings)

    def identity(self) -> Any:
        """Enough to notice that a file changed between a killed audit and its resumption."""
        if self.path is None:
            return None
        files, template = files_of(self.source), self.columns.get("chat_template")
        files += [Path(template)] if template is not None and Path(template).exists() else []
        stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
        return [[list(entry) for entry in stats], self.columns]


def tokenised_for(
    source: CorpusSource, tokenizer: Any, folder: Path, *, with_spans: bool = False, **how: Any
) -> TokenizedCorpus:
    """The corpus in the tokenizer's tokens: stored ones where they fit, made under `folder` else. `how`
    is for `tokenize_documents`."""
    fingerprint = tokenizer_fingerprint(tokenizer)
    stored, is_cut = source.prepared(), source.columns.get("max_length") is not None
    fits = stored is not None and stored.tokenizer_fingerprint == fingerprint
    if stored is not None and fits and not with_spans and not is_cut:
        return stored
    if stored is not None and stored.roles is not None:
        raise _is_another_text()
    template = str(getattr(tokenizer, "chat_template", None))
    key = {
        "tokenizer": fingerprint,
        "template": blake2b(template.encode("utf-8", "replace")).hexdigest(),
        "source": source.identity(),
        "spans": with_spans,
    }
    key_file = folder.with_suffix(".json")
    if folder.exists():
        try:
            known = read_json(key_file) if key_file.exists() else {}
            if key["source"] is not None and known.get("key") == key:
                return tokens.open_tokenized(folder)
        except DamagedError:
            (key_file.parent / LIST).unlink(missing_ok=True)  # of a work folder: it is made again
        key_file.unlink(missing_ok=True)  # first: it must never stand beside other tokens
        shutil.rmtree(folder)
    documents = source.documents()
    if documents.format == "text":
        check_plain(documents, source.columns.get("trained_on"))
    if documents.format == "text" and not is_cut:
        batches = documents.batches()
        corpus = tokens.tokenize_documents(batches, tokenizer, folder, with_spans=with_spans, **how)
    elif with_spans:
        raise _is_another_text()
    else:
        reader = RolesReader(tokenizer, TextSettings(**source.columns))
        corpus = tokens.write_role_tokens(reader.documents(documents), reader, tokenizer, folder)
    write_json(key_file, {"key": key, "num_skipped": documents.num_skipped})
    return corpus


def _is_another_text() -> UsageError:
    return UsageError(
        "The corpus holds chats, or rows that training cut off, which each model's own tokenizer makes another text of, so "
        "a public model with another tokenizer cannot be set beside it. Give a public model with the same tokenizer."
    )


def num_skipped(folder: Path) -> int:
    """Unusable rows left out when the tokens in `folder` were made."""
    key_file = folder.with_suffix(".json")
    return read_json(key_file)["num_skipped"] if key_file.exists() else 0


def open_run_corpus(run: RunRecord) -> PreparedCorpus:
    """The prepared corpus of a run, refused where other text lies at its path by now.

    Holds:
        the_same: training text, held-out text and tokenizer are those the run recorded.
    """
    prepared = open_prepared(run.corpus_folder)
    if differing := differences(run, prepared):
        raise UsageError(
            f"{run.corpus_folder} is not what {run.folder} was trained on: it has another {' and another '.join(differing)}. "
            "What is measured on it would say nothing about the run. Put the corpus back that was there, or prepare it "
            "there again from the same source with the same settings."
        )
    return prepared


def differences(run: RunRecord, prepared: PreparedCorpus) -> list[str]:
    """What of a corpus is not as the run recorded it; nothing where it recorded nothing."""
    recorded = run.config["corpus"]
    if "corpus_fingerprint" not in recorded:
        return []
    there = fingerprints(prepared)
    # Nothing held out is recorded as nothing at all.
    return [what for name, what in _PARTS.items() if recorded.get(name) != there[name]]


def fingerprints(prepared: PreparedCorpus) -> dict[str, str | None]:
    """The text and the tokenizer of a corpus, by the names that a run records them under."""
    held = prepared.validation
    return {
        "corpus_fingerprint": prepared.train.corpus_fingerprint,
        "validation_fingerprint": None if held is None else held.corpus_fingerprint,
        "tokenizer_fingerprint": prepared.train.tokenizer_fingerprint,
    }


def check_reference(
    reference: Path, corpus: TokenizedCorpus, source: CorpusSource | None, part: str
) -> list[str]:
    """Refuse a reference that learnt the members, or the others; returns what is to be noted of it.

    `reference` is a run, a model inside one, or a model from elsewhere, of which nothing is known;
    `corpus` is made of `source`, and `part` a key of _KNOWN_TO_IT.
    """
    folder = None if source is None else source.path
    folder = folder if folder is not None and is_prepared(folder) else None
    text = f"this very {_KNOWN_TO_IT[part][0]} text"
    if folder is not None and _card_names(reference, folder):
        raise _no_reference(reference, text)
    marks = set() if folder is None else marks_of(folder)
    if source is not None and source.path is not None and source.path.is_file():
        marks = marks_behind(source.documents().fingerprint())
    if origin_of(reference).learnt & marks:
        raise _no_reference(reference, f"{text}, or another part of the same text")
    run = run_around(reference)
    return [] if run is None else _check_run(reference, run, corpus, part)


def _check_run(reference: Path, run: RunRecord, corpus: TokenizedCorpus, part: str) -> list[str]:
    what, too = _KNOWN_TO_IT[part]
    if run.config["corpus"].get("corpus_fingerprint") == corpus.corpus_fingerprint:
        raise _no_reference(reference, f"this very {what} text")
    if (theirs := _text_of(run)) is None:
        return [
            f"What {reference} was trained on is no longer there, so nobody can tell whether it saw the {what} "
            f"documents; its score is too {too} if it did."
        ]
    if theirs.tokenizer_fingerprint != corpus.tokenizer_fingerprint:
        return []  # refused when it is opened, with the reason

    shared, _ = standing_in_both(corpus, theirs)
    if not shared.any():
        return []
    share = f"{shared.sum():,} of the {len(shared):,} {what} documents"
    if shared.mean() > MOST_SHARED:
        raise _no_reference(reference, share)
    return [
        f"The reference was itself trained on {share}; its score is too {too} by what it keeps of these."
    ]


def _text_of(run: RunRecord) -> TokenizedCorpus | None:
    if not is_prepared(run.corpus_folder):
        return None
    prepared = open_prepared(run.corpus_folder)
    return None if differences(run, prepared) else prepared.train


def _card_names(model: Path, folder: Path) -> bool:
    """Whether the model's own card names the corpus, as that of a private run does."""
    card, own = model / "guarantee.json", name_of(folder)
    if not card.is_file() or own is None:
        return False
    return bool(read_json(card).get("corpus_fingerprint") == own)


def _no_reference(reference: Path, what: str) -> UsageError:
    return UsageError(
        f"{reference} was itself trained on {what}, so it is no reference. Give a model that saw neither the "
        "training text nor the held-out text: trained on other text, or public."
    )


def standing_in_both(one: TokenizedCorpus, other: TokenizedCorpus) -> tuple[np.ndarray, np.ndarray]:
    """Which documents of each corpus stand, token for token, in the other too.

    Digests of `other` alone are held; it should be the smaller one.
    """
    digests = [_digest(other, index) for index in range(other.num_documents)]
    wanted, shared = set(digests), set()
    in_one = np.zeros(one.num_documents, dtype=bool)
    for index in range(one.num_documents):
        digest = _digest(one, index)
        if digest in wanted:
            in_one[index] = True
            shared.add(digest)
    return in_one, np.array([digest in shared for digest in digests], dtype=bool)


def _digest(corpus: TokenizedCorpus, index: int) -> bytes:
    return blake2b(np.ascontiguousarray(corpus.document(index)).data, digest_size=16).digest()


def model_folder(model: Path) -> Path:
    """`model` itself, or the model of a finished run."""
    return finished_run(model).model_folder if is_run(model) else model


def finished_run(run: str | Path | RunRecord) -> RunRecord:
    """The run; refused while its training is under way."""
    record = run if isinstance(run, RunRecord) else open_run(Path(run))
    if not record.finished:
        raise UsageError(f"{record.folder} is not finished training. Give its train command again.")
    return record
