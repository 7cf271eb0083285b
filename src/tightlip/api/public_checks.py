"""Whether a model and a corpus that are called public are known to hold the private text after all."""

from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.logs import log
from tightlip.core.progress import task
from tightlip.corpus.canaries import KEY, read_key
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.history import fingerprints, history_of, origin_of, sources_of
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.public_text import TextColumn
from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.corpus.shared_text import Documents, Several, Shared, Without, shared_text
from tightlip.models.loading import load_tokenizer

PUBLIC_CORPUS, MODEL_TEXT = "public_corpus", "model_text"


def refuse_private_model(model: Path, corpus: PreparedCorpus) -> None:
    """A model that learnt this text finds it ordinary, and its weights would tell of all of it.

    Holds:
        chained: it is found through runs that went on from one another, and in a copy.
        words: so is a vocabulary that was learnt from this text.
    """
    origin, sources = origin_of(model), sources_of(corpus.folder)
    own = corpus.folder / "id.json"
    if origin.learnt(
        sources=sources,
        name=str(read_json(own)["id"]) if own.is_file() else "",
        text_fingerprint=corpus.train.corpus_fingerprint,
    ):
        raise UsageError(
            f"public_model={str(model)!r} was trained on this very corpus or another part of the same text, by itself or "
            "through the model that it went on from. It knows the rarest text by heart. Give a model that never saw it."
        )
    if origin.vocabulary & sources and not _is_charged(model, corpus):
        raise UsageError(
            f"The vocabulary of public_model={str(model)!r} was learnt from this very corpus, so every weight would tell "
            "which words are in it. Give a model with a tokenizer of other text."
        )


def _is_charged(model: Path, corpus: PreparedCorpus) -> bool:
    """A noisy vocabulary that this corpus uses itself is a release that its runs pay for."""
    theirs = tokenizer_fingerprint(load_tokenizer(model))
    return bool(corpus.releases) and theirs == corpus.train.tokenizer_fingerprint


def refuse_private_text(public: Corpus | TextColumn, corpus: PreparedCorpus) -> None:
    """Constants from the private text would make every weight depend on every document."""
    source = read_json(corpus.folder / "prepared.json")["source_fingerprint"]
    is_inside = Path(public.name).resolve().is_relative_to(corpus.folder.resolve())
    cut_from_it = fingerprints(history_of(public.name)) & sources_of(corpus.folder)
    if is_inside or cut_from_it or public.fingerprint() == source:
        raise UsageError(
            f"public_corpus={public.name!r} is the corpus itself or a part of it. Give text that anybody may read and that "
            "nobody of this corpus wrote."
        )


def known_overlap(
    corpus: PreparedCorpus, public: Corpus | TextColumn | None, model: Path | None
) -> dict[str, Any]:
    """What the corpus shares with the public one and with all text behind the model that still
    stands there; a refusal where that is more than a few texts.

    The counts are private like the text.
    """
    own = _own_text(corpus)
    found: dict[str, Any] = {PUBLIC_CORPUS: None, MODEL_TEXT: []}
    if public is not None:
        with task("Comparing with the public corpus", None):
            shared = shared_text(own, public)
        _check(shared, f"public_corpus={public.name!r}", "so it is not public")
        found[PUBLIC_CORPUS] = shared.to_json()
    for folder in () if model is None else origin_of(model).folders:
        if sources_of(folder) & sources_of(corpus.folder):
            continue  # this very text, of which only a noisy vocabulary was let pass
        with task("Comparing with the model's text", None):
            shared = shared_text(own, open_corpus(folder / "train.parquet"))
        _check(shared, f"{folder}, which shaped public_model={str(model)!r},", "so it saw them")
        found[MODEL_TEXT].append({"corpus": folder.name, **shared.to_json()})
    return found


def _check(shared: Shared, name: str, so: str) -> None:
    words = shared.words(name)
    if shared.is_too_much():
        raise UsageError(
            f"{words}, {so}. Weights would tell of them, and no proof covers that. Give text, or a model of text, that "
            "nobody of this corpus wrote."
        )
    if shared.any():
        log.warning(
            "%s. These count as public text: weights may tell of them. Take them out of one of the two if they are "
            "somebody's own.",
            words,
        )


def _own_text(corpus: PreparedCorpus) -> Documents:
    """All that the corpus' users wrote, what was held out of it too; no canaries, which may have
    been planted in public text on purpose."""
    parts = [open_corpus(corpus.folder / "train.parquet")]
    held = corpus.folder / "validation.parquet"
    if corpus.settings.get("validation") is None and held.is_file():
        parts.append(open_corpus(held))
    planted = {text for key in _keys_beside(corpus) for text in _planted(key)}
    return Without(Several(*parts), planted) if planted else Several(*parts)


def _keys_beside(corpus: PreparedCorpus) -> list[Path]:
    """Keys of canaries where the corpus' source is, as it was named or beside the prepared folder:
    the name may be relative to another place."""
    named = Path(str(read_json(corpus.folder / "prepared.json")["source"]))
    near = corpus.folder.resolve().parent / named.parent.name
    return [folder / KEY for folder in (named.parent, near) if (folder / KEY).is_file()]


def _planted(key: Path) -> set[str]:
    try:
        return {canary.text for canary in read_key(key).canaries if canary.kind == "planted"}
    except UsageError:  # somebody's own file of that name
        return set()
