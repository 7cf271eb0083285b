"""A corpus as numbers: tokens, where documents begin, who wrote each.

Training and scanning read nothing else. The folder holds plain `.npy` files:

    tokens.npy   int32, all documents end to end
    bounds.npy   int64, document i is tokens[bounds[i]:bounds[i + 1]]
    users.npy    int32, the number of document i's user: who wrote it
    owners.npy, owner_bounds.npy  int32, int64: document i belongs to owners[owner_bounds[i]:owner_bounds[i + 1]],
                 its user first; only where some document has several
    spans.npy    int32 (tokens, 2), a token's characters in its document; only where asked for
    roles.npy    int8, the number of each token's role, 0 for what a template wrote; only of chats
    trained.npy  int8, whether each token was trained on; only of chats
    info.json    user names and roles by number, fingerprints of the text and of the tokenizer

Document i is row i of the corpus it came from.
"""

import hashlib
import io
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tightlip.core.checksums import checked
from tightlip.core.engines import Engine, local_engine, map_beside
from tightlip.core.errors import UsageError
from tightlip.core.files import damage_in_words, folder_written_whole, read_json, write_json
from tightlip.core.progress import task
from tightlip.corpus.encoding import Encoder, tokenizer_fingerprint
from tightlip.corpus.owners import Writer, owners_of
from tightlip.corpus.tables import DocumentBatch

_COUNTED_AT_ONCE = 4_000_000
_SIZE = struct.Struct("<q").pack
_KINDS = {"tokens": "i4", "spans": "2i4", "roles": "i1", "trained": "i1"}  # as numpy spells them


class Mapped:
    """To another process arrays go by the path of the file that they are mapped from."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _file_of(value) or value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, mapped(value) if isinstance(value, Path) else value)


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus(Mapped):
    """Documents as token ids, each with its user's number."""

    tokens: np.ndarray
    bounds: np.ndarray
    users: np.ndarray
    user_names: list[str]
    corpus_fingerprint: str
    tokenizer_fingerprint: str
    spans: np.ndarray | None = None
    roles: np.ndarray | None = None
    trained: np.ndarray | None = None
    role_names: list[str] | None = None
    owners: np.ndarray | None = None
    owner_bounds: np.ndarray | None = None
    # Whether its tokens hold what stood before each text, as templates write it.
    begins_itself: bool = False

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.users) + 1
        assert self.bounds[0] == 0
        assert self.bounds[-1] == len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.users)

    @property
    def num_users(self) -> int:
        return len(self.user_names)

    def owned(self, documents: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """All owners of these documents, or of all; before them the place of each one's document."""
        chosen = np.arange(self.num_documents) if documents is None else documents
        places = np.arange(len(chosen))
        if self.owners is None or self.owner_bounds is None:
            return places, np.asarray(self.users)[chosen]
        sizes = np.diff(self.owner_bounds)[chosen]
        first = np.repeat(self.owner_bounds[chosen] - (np.cumsum(sizes) - sizes), sizes)
        return np.repeat(places, sizes), self.owners[first + np.arange(len(first))]

    def statistics(self, unknown_id: int | None) -> dict[str, Any]:
        """Documents, users and tokens; `unknown_id` stands for words outside the vocabulary."""
        num_unknown = 0
        if unknown_id is not None:
            for start in range(0, self.num_tokens, _COUNTED_AT_ONCE):
                chunk = self.tokens[start : start + _COUNTED_AT_ONCE]
                num_unknown += int((chunk == unknown_id).sum())
        return {
            "documents": self.num_documents,
            "users": self.num_users,
            "tokens": self.num_tokens,
            "unknown_tokens": num_unknown,
            "unknown_share": num_unknown / max(self.num_tokens, 1),
            "documents_per_user": spread(np.bincount(self.owned()[1], minlength=self.num_users)),
            "corpus_fingerprint": self.corpus_fingerprint,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
        }

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]


def spread(counts: np.ndarray) -> dict[str, float]:
    """The smallest, middle and largest of some counts."""
    if not len(counts):
        return {"min": 0, "median": 0, "max": 0}
    return {"min": int(counts.min()), "median": float(np.median(counts)), "max": int(counts.max())}


def open_tokenized(folder: Path) -> TokenizedCorpus:
    """The corpus stored in `folder`, mapped rather than read."""
    info_file = folder / "info.json"
    if not info_file.exists():
        raise UsageError(
            f"{folder} holds no tokenised corpus (no info.json). Run: tightlip prepare"
        )
    info = read_json(info_file)
    arrays = ["tokens", "bounds", "users"]
    arrays += ["spans"] if (folder / "spans.npy").exists() else []
    arrays += ["roles", "trained"] if "role_names" in info else []
    arrays += ["owners", "owner_bounds"] if info.get("co_owners") else []
    with damage_in_words(folder):
        corpus = TokenizedCorpus(
            **{name: mapped(folder / f"{name}.npy") for name in arrays},
            role_names=info.get("role_names"),
            begins_itself=bool(info.get("begins_itself", False)),
            user_names=info["user_names"],
            corpus_fingerprint=info["corpus_fingerprint"],
            tokenizer_fingerprint=info["tokenizer_fingerprint"],
        )
        _check_fits(corpus)
    return corpus


def _check_fits(corpus: TokenizedCorpus) -> None:
    """Compiled code trusts these numbers, and would read memory that is nobody's."""
    bounds, users = corpus.bounds, corpus.users
    fits = [
        bounds.ndim == users.ndim == corpus.tokens.ndim == 1,
        (np.diff(bounds) >= 0).all(),
        users.min(initial=0) >= 0,
        users.max(initial=-1) < corpus.num_users,
    ]
    if corpus.owners is not None and corpus.owner_bounds is not None:
        owners, edges = corpus.owners, corpus.owner_bounds
        fits += [owners.ndim == edges.ndim == 1, len(edges) == len(bounds)]
        fits += [edges[-1] == len(owners), (np.diff(edges) > 0).all()]
        fits += [owners.min(initial=0) >= 0, owners.max(initial=-1) < corpus.num_users]
        # The first owner of every document is its writer, so that none has no owner.
        fits += [all(fits) and bool((owners[edges[:-1]] == users).all())]
    if not all(fits):
        raise ValueError("bounds, users and tokens are not of one corpus")


def _file_of(value: Any) -> Path | None:
    """The file that all of an array is mapped from."""
    whole = value.base if isinstance(value, np.ndarray) else None
    if not isinstance(whole, np.memmap) or whole.shape != value.shape or whole.filename is None:
        return None
    return Path(whole.filename)


def mapped(path: Path) -> np.ndarray:
    # An empty file cannot be mapped; np.asarray drops the memmap class, which numba does not know.
    with checked(path).open("rb") as stream:
        np.lib.format.read_magic(stream)
        shape, _, _ = np.lib.format.read_array_header_1_0(stream)
    return np.load(path) if 0 in shape else np.asarray(np.load(path, mmap_mode="r"))


def tokenize_documents(
    batches: Iterable[DocumentBatch],
    tokenizer: Any,
    folder: Path,
    *,
    with_spans: bool = False,
    description: str = "Tokenising",
    also: Callable[[np.ndarray, np.ndarray], None] | None = None,
    engine: Engine | None = None,
) -> TokenizedCorpus:
    """Encode documents into `folder`, which appears when all are there; `also` is shown the tokens of
    some documents at a time, and how many each has.

    Holds:
        streamed: of the corpus only document bounds and users are held in memory.
        numbered: users are numbered in the order in which they first appear.
    """
    encoder = Encoder(tokenizer, with_spans=with_spans)
    has_text = False
    with folder_written_whole(folder) as beside, task(description, None) as bar:
        writer = _Writer(beside, *(("spans",) if with_spans else ()))
        pairs = ((batch, batch.texts) for batch in batches)
        # Bound to no name, the processes end with the loop, whatever is kept of an error.
        for batch, (ids, sizes, spans) in map_beside(
            engine or local_engine(), encoder.end_to_end, pairs
        ):
            further = {} if spans is None else {"spans": spans}
            contents = [text.encode("utf-8") for text in batch.texts]
            writer.add(batch.users, contents, sizes, tokens=ids, **further)
            if also is not None:
                also(ids, sizes)
            has_text = has_text or any(text.strip() for text in batch.texts)
            bar.advance(len(batch))
        if has_text and not writer.num_tokens:
            raise UsageError(
                "The tokenizer makes no token of any text of the corpus, so nothing could be found whatever the model knows. "
                "Give the tokenizer that the model was trained with."
            )
        writer.finish(tokenizer_fingerprint(tokenizer))
    return open_tokenized(folder)


def write_role_tokens(
    documents: Iterable[Any], reader: Any, tokenizer: Any, folder: Path
) -> TokenizedCorpus:
    """The same of documents that come as tokens with roles, out of a `rendered.RolesReader`."""
    with folder_written_whole(folder) as beside, task("Tokenising", None) as bar:
        writer = _Writer(beside, "roles", "trained")
        for each in documents:
            arrays = {"tokens": each.ids, "roles": each.roles, "trained": each.trained}
            writer.add([each.user], [each.content], [len(each.ids)], **arrays)
            bar.advance()
        about = {"role_names": reader.role_names, "begins_itself": reader.begins_itself}
        writer.finish(tokenizer_fingerprint(tokenizer), **about)
    return open_tokenized(folder)


class _Writer:
    """The growing files of one folder: tokens, and what stands beside each of them."""

    def __init__(self, folder: Path, *further: str) -> None:
        self._folder = folder
        self._arrays = {
            name: GrowingArray(folder / f"{name}.npy", np.dtype(_KINDS[name]))
            for name in ("tokens", *further)
        }
        self._bounds, self._users = array("q", [0]), array("i")
        self._owner_bounds, self._owners = array("q", [0]), array("i")
        self._numbers: dict[str, int] = {}
        self._digest = hashlib.sha256()

    @property
    def num_tokens(self) -> int:
        return self._bounds[-1]

    def add(
        self,
        users: Sequence[str],
        contents: Sequence[bytes],
        sizes: Sequence[int] | np.ndarray,
        **arrays: np.ndarray,
    ) -> None:
        """Some documents: of each its user, its text and its number of tokens, and of all of them
        together the rows of every array."""
        for name, rows in arrays.items():
            self._arrays[name].extend(rows)
        _extend(self._bounds, sizes)
        owners = [owners_of(user) if isinstance(user, Writer) else (user,) for user in users]
        known, names = self._numbers, [*chain.from_iterable(owners)]
        numbers = array("i", [known.setdefault(name, len(known)) for name in names])
        begins = [0, *accumulate(map(len, owners))][:-1]
        self._users.extend(array("i", [numbers[begin] for begin in begins]))
        self._owners.extend(numbers)
        _extend(self._owner_bounds, [len(each) for each in owners])
        # No name has the byte 255, so that owners read otherwise than any one user.
        whose = [b"\xff".join([name.encode("utf-8") for name in each]) for each in owners]
        sized = ((map(_SIZE, map(len, parts)), parts) for parts in (whose, contents))
        parts = zip(*chain.from_iterable(sized), strict=True)
        self._digest.update(b"".join(chain.from_iterable(parts)))

    def finish(self, fingerprint: str, **more: Any) -> None:
        for each in self._arrays.values():
            each.close()
        np.save(self._folder / "bounds.npy", np.frombuffer(self._bounds, np.int64))
        np.save(self._folder / "users.npy", np.frombuffer(self._users, np.int32))
        if len(self._owners) > len(self._users):
            more["co_owners"] = True
            np.save(self._folder / "owners.npy", np.frombuffer(self._owners, np.int32))
            np.save(self._folder / "owner_bounds.npy", np.frombuffer(self._owner_bounds, np.int64))
        info = {
            "user_names": list(self._numbers),
            "corpus_fingerprint": self._digest.hexdigest(),
            "tokenizer_fingerprint": fingerprint,
            **more,
        }
        write_json(self._folder / "info.json", info)


def _extend(edges: array, sizes: Sequence[int] | np.ndarray) -> None:
    """Where stretches of these sizes end, after the last that is there."""
    edges.frombytes((edges[-1] + np.cumsum(sizes, dtype=np.int64)).tobytes())


class GrowingArray:
    """An `.npy` file of whole numbers whose length is written into its header last."""

    def __init__(self, path: Path, kind: np.dtype) -> None:
        self._dtype, self._row = kind.base, kind.shape
        self._length = 0
        self._stream: BinaryIO = path.open("wb")
        self._stream.write(self._header(0))

    def extend(self, rows: np.ndarray) -> None:
        self._stream.write(np.ascontiguousarray(rows, self._dtype).data)
        self._length += len(rows)

    def close(self) -> None:
        assert len(self._header(self._length)) == len(self._header(0))
        self._stream.seek(0)
        self._stream.write(self._header(self._length))
        self._stream.close()

    def _header(self, length: int) -> bytes:
        # numpy pads the header so that the first axis may grow.
        stream = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(self._dtype)
        about = {"descr": descr, "fortran_order": False, "shape": (length, *self._row)}
        np.lib.format.write_array_header_1_0(stream, about)
        return stream.getvalue()
