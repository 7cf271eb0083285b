"""Public text, which privacy weights are measured against.

It may come without users; where no model is given, the frequencies of its words say how surprising
a text is; and it must not be known to hold the private text after all, nor must the public model.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from tightlip.core.checksums import listed
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import log, task
from tightlip.corpus import history
from tightlip.corpus.canaries import KEY, read_canary_key
from tightlip.corpus.conversations import format_of
from tightlip.corpus.formats import Fault, Row, kind_of, rows_of
from tightlip.corpus.history import fingerprints, history_of, people_in, sources_of
from tightlip.corpus.owners import columns_there
from tightlip.corpus.prepare import PreparedCorpus, open_prepared
from tightlip.corpus.prepare_config import BadRows, ColumnSettings, TextSettings
from tightlip.corpus.readers import Corpus, Part, open_corpus
from tightlip.corpus.shared_text import Several, Shared, shared_text

NOBODY = ""
PUBLIC_CORPUS, MODEL_TEXT = "public_corpus", "model_text"
FREQUENCY_ESTIMATE = "frequency estimate, no language model"
AFTER_WORD, BY_ITSELF, EQUAL = 0.6, 0.35, 0.05
_WORD = re.compile(r"\w+|[^\w\s]")
_START = ""  # before the first word; no word is empty


class TextColumn(Corpus):
    """A file of texts without users, read like a corpus."""

    def __init__(self, path: Path, column: str, bad_rows: BadRows) -> None:
        columns = ColumnSettings(bad_rows=bad_rows)
        super().__init__(str(path), [Part(str(path), self._rows, path)], columns)
        self._path, self._column = path, column

    def _rows(self) -> Iterator[tuple[int, Row]]:
        for number, row in rows_of(self._path):
            text = row.get(self._column) if isinstance(row, dict) else None
            if isinstance(text, str):
                yield number, {"user": NOBODY, "text": text}
            else:
                yield number, Fault(f"has no text in column {self._column!r}")


class NobodysRows(Corpus):
    """A file of chats or prompts without users, read like a corpus."""

    def __init__(self, path: Path, columns: TextSettings) -> None:
        super().__init__(str(path), [Part(str(path), self._rows, path)], columns)
        self._path = path

    def _rows(self) -> Iterator[tuple[int, Row]]:
        for number, row in rows_of(self._path):
            yield number, row | {self._user_column: NOBODY} if isinstance(row, dict) else row


def open_public(
    path: Path, *, user_column: str, text_column: str, bad_rows: BadRows, format: str = "auto"
) -> Corpus:
    """The public corpus at `path`, its text in the private corpus' column or in `text`.

    A file without users is read by its text column alone, or by those of its chats or prompts.
    """
    columns = TextSettings(
        user_column=user_column, text_column=text_column, bad_rows=bad_rows, format=format
    )
    if path.is_file() and kind_of(path) is not None and path.stat().st_size:
        _, first = next(rows_of(path), (0, {}))
        if isinstance(first, dict) and user_column not in first:
            told = format if format != "auto" else format_of(first, text_column)
            if told not in (None, "text"):
                return NobodysRows(path, columns)
            column = next((name for name in (text_column, "text") if name in first), None)
            if column is None:
                raise UsageError(
                    f"{path} has no column {text_column!r} and none named text. "
                    f"{columns_there(first, text_column, is_csv=kind_of(path) == 'csv')} Rename the one that holds the text."
                )
            return TextColumn(path, column, bad_rows)
    return open_corpus(
        path, user_column=user_column, text_column=text_column, bad_rows=bad_rows, format=format
    )


def words_of(text: str) -> list[str]:
    """Words and punctuation in small letters.

    >>> words_of("It's late, Bob!")
    ['it', "'", 's', 'late', ',', 'bob', '!']
    """
    return _WORD.findall(text.casefold())


class WordFrequencies:
    """Counts of words and of pairs of neighbours in public text.

    Holds:
        sums_to_one: after any word, the known words and the unknown one have probability 1 together.
        without_itself: a text scored `without_itself` is scored as if it had never been counted.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.words: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.firsts: Counter[str] = Counter()  # how often a word has another after it
        for text in texts:
            words, pairs = _counted(text)
            self.words.update(words)
            self.pairs.update(pairs)
            self.firsts.update(first for first, _ in pairs)
        self.num_words, self.num_known = self.words.total(), len(self.words)

    def log_perplexity(self, text: str, *, without_itself: bool = False) -> float:
        """Nats a word; NaN for a text without words. Public texts are scored without themselves,
        or their own words would look more ordinary than anybody else's ever could."""
        words, pairs = _counted(text)
        if not words:
            return math.nan
        own = WordFrequencies([text]) if without_itself else _NOTHING
        # Only words that stand elsewhere too are known.
        num_known = self.num_known - sum(self.words[each] == n for each, n in own.words.items())
        nats = [math.log(self._probability(*pair, own, num_known)) for pair in pairs]
        return -math.fsum(nats) / len(nats)

    def _probability(self, first: str, word: str, own: "WordFrequencies", num_known: int) -> float:
        """A part of the mixture that was never seen gives its share to the next."""
        equal = 1 / (num_known + 1)
        left = self.num_words - own.num_words
        alone = (self.words[word] - own.words[word]) / left if left else equal
        times = self.firsts[first] - own.firsts[first]
        after = (self.pairs[first, word] - own.pairs[first, word]) / times if times else alone
        return AFTER_WORD * after + BY_ITSELF * alone + EQUAL * equal


def _counted(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    words = words_of(text)
    return words, list(zip([_START, *words], words, strict=False))


_NOTHING = WordFrequencies([])


def refuse_private_text(public: Corpus, corpus: PreparedCorpus) -> None:
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
    corpus: PreparedCorpus, public: Corpus | None, model: Path | None
) -> dict[str, Any]:
    """What the corpus shares with the public one and with all text behind the model that still
    stands there; a refusal where that is more than a few texts.

    The counts are private like the text.
    """
    own = _own_text(corpus)
    overlap: dict[str, Any] = {PUBLIC_CORPUS: None, MODEL_TEXT: []}
    if public is not None:
        with task("Comparing with the public corpus", None):
            shared = shared_text(own, public)
        _check(shared, f"public_corpus={public.name!r}", "so it is not public")
        overlap[PUBLIC_CORPUS] = asdict(shared)
    for folder in () if model is None else history.origin_of(model).folders:
        if sources_of(folder) & sources_of(corpus.folder):
            continue  # this very text, of which only a noisy vocabulary was let pass
        with task("Comparing with the model's text", None):
            shared = shared_text(own, open_corpus(folder / "train.parquet"))
        _check(shared, f"{folder}, which shaped public_model={str(model)!r},", "so it saw them")
        overlap[MODEL_TEXT].append({"corpus": folder.name, **asdict(shared)})
    return overlap


def check_public_validation(held_out: Corpus, marks: set[str], folder: Path) -> None:
    """Refuse text as public that is known to be of the corpus, of its people, or nearly the same."""
    theirs = {held_out.fingerprint(), *fingerprints(held_out.history), *people_in(held_out.history)}
    train, held = (open_corpus(folder / f"{name}.parquet") for name in ("train", "validation"))
    if theirs & marks or shared_text(train, held).is_too_much():
        raise UsageError(
            f"public_validation={held_out.name!r} is not public: it is this corpus or a part of it, of the same people, or shares "
            "texts with it. Give text that anybody may read and that nobody of this corpus wrote, or use --validation."
        )


def stands_in(corpus: Path, other: Path) -> bool:
    """Whether two prepared corpora share more than a few texts, though neither knows of the other.

    How many is private like the text: it is said to the owner, and never put on record.
    """
    return _stands_in(corpus, other, history.name_of(corpus), history.name_of(other))


@lru_cache(maxsize=32)
def _stands_in(corpus: Path, other: Path, *_names: str | None) -> bool:
    with task("Comparing with text behind the start", None):
        own = _own_text(open_prepared(corpus))
        shared = shared_text(own, open_corpus(other / "train.parquet"))
    if shared.any():
        log.warning("%s. Texts in both have no promise.", shared.words(str(other)))
    return shared.is_too_much()


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


def _own_text(corpus: PreparedCorpus) -> Several:
    """All that the corpus' users wrote, what was held out of it too; no canaries, which may have
    been planted in public text on purpose."""
    parts = [open_corpus(corpus.folder / "train.parquet")]
    held = corpus.folder / "validation.parquet"
    if corpus.settings.get("validation") is None and held.is_file():
        parts.append(open_corpus(held))
    return Several(*parts, without={text for key in _keys_beside(corpus) for text in _planted(key)})


def _keys_beside(corpus: PreparedCorpus) -> list[Path]:
    """Keys of canaries where the corpus' source is, as it was named or beside the prepared folder:
    the name may be relative to another place."""
    named = Path(str(read_json(corpus.folder / "prepared.json")["source"]))
    near = corpus.folder.resolve().parent / named.parent.name
    return [folder / KEY for folder in (named.parent, near) if (folder / KEY).is_file()]


def _planted(key: Path) -> set[str]:
    try:
        return {canary.text for canary in read_canary_key(key).of_planted}
    except UsageError:
        if key.name in listed(key.parent):
            raise
        return set()  # somebody's own file of that name
