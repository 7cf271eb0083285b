"""Token ids of texts, all of each text, through whatever tokenizer a model has.

A fast tokenizer is asked through its Rust batch call, which uses every core. Long
texts are cut first where the cut provably changes nothing (`cuts_at_spaces`), for
the library needs 50 to 80 bytes of memory for each byte it is given at once.
"""

import json
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tightlip.core.checksums import checked
from tightlip.core.devices import check_token_ids
from tightlip.core.errors import UsageError

PIECE_CHARACTERS = 50_000
GROUP_CHARACTERS = 4_000_000
# Letters with combining marks, joined by apostrophes or the joiners of Persian and Hindi; or any one
# character. Corpora with rare words already struck out write <unk> for them.
_LETTERS = r"\p{L}[\p{L}\p{M}]*"
WORD_PATTERN = rf"<unk>|{_LETTERS}(?:['’\x{{200C}}\x{{200D}}]{_LETTERS})*|\S"
# Between two visible characters; the space opens the right-hand piece, as byte-level BPE wants it.
_SAFE_CUT = re.compile(r"(?<=\S)[ \n](?=\S)")

_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


class Encoded(NamedTuple):
    """Ids (int32) of several texts, one after the other; how many each text has; and where asked
    for, the characters of its text that each token covers."""

    ids: np.ndarray
    sizes: np.ndarray
    spans: np.ndarray | None


class Encoder:
    """Encodes texts whole: no truncation, padding or special tokens, whatever was saved.

    A fast tokenizer's encoder can be pickled, and needs no transformers where it is unpickled.

    Holds:
        whole: cutting long texts gives the same ids and spans as not cutting them.
    """

    def __init__(self, tokenizer: Any, *, with_spans: bool = False) -> None:
        self._slow = None if tokenizer.is_fast else tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._with_spans = with_spans
        self._splits_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        if with_spans and self._backend is None:
            raise UsageError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it cannot say which characters a "
                "token covers. Use a model whose tokenizer comes as tokenizer.json."
            )
        check_token_ids(f"A {type(tokenizer).__name__}", tokenizer)
        self.may_cut = self._backend is not None and cuts_at_spaces(self._backend)

    def __getstate__(self) -> dict[str, Any]:
        if self._slow is not None:  # it would take all of transformers along
            raise pickle.PicklingError("a tokenizer written in Python stays in its process")
        return self.__dict__

    def encode(self, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Each text's ids, and each token's character span where asked for."""
        ids, sizes, spans = self.end_to_end(texts)
        edges = [*pairwise(accumulate(sizes.tolist(), initial=0))]
        parts = [
            [each[start:end] for start, end in edges] for each in (ids, spans) if each is not None
        ]
        return parts[0], parts[1] if self._with_spans else None

    def end_to_end(self, texts: list[str]) -> Encoded:
        """The same in arrays of all texts: of a sentence alone, making one would cost more than the work."""
        if self._slow is not None:
            called = self._slow(
                texts, add_special_tokens=False, truncation=False, padding=False, verbose=False
            )
            return Encoded(*_joined(called["input_ids"]), None)
        if not (self.may_cut and any(len(text) > PIECE_CHARACTERS for text in texts)):
            return self._encode_fast(texts)
        return self._encode_long(texts)

    def _encode_fast(self, texts: list[str]) -> Encoded:
        backend = self._backend
        assert backend is not None
        with _everything(backend, self._splits_special_tokens):
            call = backend.encode_batch if self._with_spans else backend.encode_batch_fast
            encodings = call(texts, add_special_tokens=False)
        ids, sizes = _joined([encoding.ids for encoding in encodings])
        if not self._with_spans:
            return Encoded(ids, sizes, None)
        spans = [np.array(encoding.offsets, np.int32).reshape(-1, 2) for encoding in encodings]
        return Encoded(ids, sizes, _without_leading_spaces(spans, texts))

    def _encode_long(self, texts: list[str]) -> Encoded:
        sizes, parts = np.zeros(len(texts), np.int64), []
        for group in _groups(texts):
            documents, starts, some = zip(*group, strict=True)
            part = self._encode_fast([*some])
            np.add.at(sizes, [*documents], part.sizes)
            if part.spans is not None:
                part.spans[:] += np.repeat(np.array(starts, np.int32), part.sizes)[:, None]
            parts.append(part)
        ids, _, spans = zip(*parts, strict=True)
        return Encoded(
            np.concatenate(ids), sizes, np.concatenate(spans) if self._with_spans else None
        )


def _joined(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids one after the other, and their sizes."""
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(sizes.sum())), sizes


def _without_leading_spaces(spans: list[np.ndarray], texts: list[str]) -> np.ndarray:
    """All texts' spans, to start at a token's first visible character.

    Some tokenizers count the space before a word to it, some do not; only without it do the
    tokens of two tokenizers start at the same places. A token of nothing but space keeps it.
    """
    if not texts:
        return np.zeros((0, 2), np.int32)
    letters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    spaces = np.isin(letters, _SPACES)
    next_visible = np.full(len(letters) + 1, len(letters), np.int64)
    visible = np.flatnonzero(~spaces)
    next_visible[:-1] = np.append(visible, len(letters))[np.cumsum(~spaces) - ~spaces]
    begins = np.repeat(np.cumsum([0, *map(len, texts[:-1])]), [*map(len, spans)])[:, None]
    joined = np.concatenate(spans) + begins
    starts = next_visible[joined[:, 0]]
    inside = starts < joined[:, 1]
    joined[inside, 0] = starts[inside]
    return (joined - begins).astype(np.int32)


def _groups(texts: list[str]) -> Iterator[list[tuple[int, int, str]]]:
    """(document, start, piece) of every text, some 4 million characters at a time."""
    group: list[tuple[int, int, str]] = []
    num_characters = 0
    for document, text in enumerate(texts):
        start = 0
        for piece in pieces(text):
            group.append((document, start, piece))
            start += len(piece)
            num_characters += len(piece)
            if num_characters > GROUP_CHARACTERS:
                yield group
                group, num_characters = [], 0
    if group:
        yield group


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about 50,000 characters, cut before a space between two words."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        if (cut := _SAFE_CUT.search(text, start + PIECE_CHARACTERS)) is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def safe_cuts(text: str) -> list[int]:
    """Where a text may be cut, if `cuts_at_spaces`: before a space between two visible characters."""
    return [cut.start() for cut in _SAFE_CUT.finditer(text)]


def cuts_at_spaces(backend: Any) -> bool:
    """Whether encoding the `pieces` of a text is encoding the text.

    True for our word tokenizers and for byte-level BPE as GPT-2 has it: both split
    from left to right without looking back, and neither changes the text first.
    """
    try:
        described = json.loads(backend.to_str())
    except Exception:  # a pre-tokenizer written in Python cannot be described
        return False
    splitter = described["pre_tokenizer"] or {}
    is_ours = splitter.get("pattern") == {"Regex": WORD_PATTERN}
    # As GPT-2 has it: by its own regex.
    is_byte_level = splitter.get("type") == "ByteLevel" and splitter.get("use_regex", True)
    known = is_ours or (is_byte_level and not splitter.get("add_prefix_space", True))
    added = described["added_tokens"]
    plain = not any(
        token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"]) for token in added
    )
    return described["normalizer"] is None and known and plain


@contextmanager
def _everything(backend: Any, split_special_tokens: bool) -> Iterator[None]:
    """The backend without its saved truncation and padding, which come back afterwards."""
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = split_special_tokens
    try:
        yield
    finally:
        if truncation:
            backend.enable_truncation(**truncation)
        if padding:
            backend.enable_padding(**padding)


def special_ids(tokenizer: Any) -> set[int]:
    """Padding, begin, end and whatever else stands for no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if getattr(token, "special", False)}
    return special | {int(number) for number in tokenizer.all_special_ids if number is not None}


def _begins_as_ours(processor: dict) -> bool:
    template = [next(iter(part.values()))["id"] for part in processor.get("single") or ()]
    pair = processor.get("pair") or ()
    return template == ["<s>", "A"] and all("Sequence" in part for part in pair)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what decides the ids: equal for a tokenizer and its saved copy."""
    if tokenizer.is_fast:
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by whoever called last; we never use them.
        described["truncation"] = described["padding"] = None
        if _begins_as_ours(described["post_processor"] or {}):
            described["post_processor"] = None  # as it was in 0.1; our ids are without it
        described["split_special_tokens"] = bool(tokenizer.split_special_tokens)
    else:
        described = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return sha256(json.dumps(described, sort_keys=True).encode("utf-8")).hexdigest()


def saved_tokenizer(folder: str) -> Any:
    """The tokenizer in a folder that somebody gave."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise UsageError(
            f"tokenizer={folder!r} is not a folder. Give one that holds tokenizer.json."
        )
    checked(Path(folder))
    try:
        # Unset, transformers asks on the terminal whether to run the folder's code.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(
            f"tokenizer={folder!r} cannot be loaded ({str(error).splitlines()[0]}). "
            "Give a folder that AutoTokenizer.from_pretrained reads."
        ) from error
