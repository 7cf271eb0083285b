"""The text a run learnt from, and whether it is still that text."""

from pathlib import Path

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.run_folder import RunRecord, run_around
from tightlip.corpus.history import sources_behind, sources_of
from tightlip.corpus.prepare import PreparedCorpus, is_prepared, open_prepared
from tightlip.corpus.tokens import TokenizedCorpus

MOST_SHARED = 0.5  # short common texts stand in any two corpora
_PARTS = {
    "corpus_fingerprint": "training text",
    "validation_fingerprint": "held-out text",
    "tokenizer_fingerprint": "tokenizer",
}


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
    found = fingerprints(prepared)
    # Nothing held out is recorded as nothing at all.
    return [what for name, what in _PARTS.items() if recorded.get(name) != found[name]]


def fingerprints(prepared: PreparedCorpus) -> dict[str, str | None]:
    """The text and the tokenizer of a corpus, by the names that a run records them under."""
    held = prepared.validation
    return {
        "corpus_fingerprint": prepared.train.corpus_fingerprint,
        "validation_fingerprint": None if held is None else held.corpus_fingerprint,
        "tokenizer_fingerprint": prepared.train.tokenizer_fingerprint,
    }


def check_reference(reference: Path, prepared: PreparedCorpus) -> list[str]:
    """Refuse a reference that learnt the members; returns what is to be noted of it.

    `reference` is a run, a model inside one, or a model from elsewhere, of which nothing is known.
    """
    if _card_names(reference, prepared):
        raise _no_reference(reference, "this very corpus")
    if sources_behind(reference) & sources_of(prepared.folder):
        raise _no_reference(reference, "this very corpus, or another part of the same text")
    run = run_around(reference)
    return [] if run is None else _check_run(reference, run, prepared)


def _check_run(reference: Path, run: RunRecord, prepared: PreparedCorpus) -> list[str]:
    train = prepared.train
    if run.config["corpus"].get("corpus_fingerprint") == train.corpus_fingerprint:
        raise _no_reference(reference, "this very corpus")
    theirs = _text_of(run)
    if theirs is None:
        return [
            f"What {reference} was trained on is no longer there, so nobody can tell whether it saw the training "
            "documents; its score is too low if it did."
        ]
    if theirs.tokenizer_fingerprint != train.tokenizer_fingerprint:
        return []  # refused when it is opened, with the reason
    from tightlip.audit.membership import standing_in_both

    shared, _ = standing_in_both(train, theirs)
    if shared.mean() > MOST_SHARED:
        raise _no_reference(
            reference, f"{shared.sum():,} of the {len(shared):,} training documents"
        )
    if not shared.any():
        return []
    return [
        f"The reference was itself trained on {shared.sum():,} of the {len(shared):,} training documents; its score is "
        "too low by what it keeps of these."
    ]


def _text_of(run: RunRecord) -> TokenizedCorpus | None:
    if not is_prepared(run.corpus_folder):
        return None
    prepared = open_prepared(run.corpus_folder)
    return None if differences(run, prepared) else prepared.train


def _card_names(model: Path, prepared: PreparedCorpus) -> bool:
    """Whether the model's own card names the corpus, as that of a private run does."""
    card, own = model / "guarantee.json", prepared.folder / "id.json"
    if not card.is_file() or not own.is_file():
        return False
    return read_json(card).get("corpus_fingerprint") == read_json(own)["id"]


def _no_reference(reference: Path, what: str) -> UsageError:
    return UsageError(
        f"{reference} was itself trained on {what}, so it is no reference. Give a model that never saw the training "
        "text: trained on other text, or public."
    )
