"""A corpus as numbers: tokens, where documents begin, who wrote each.

Training and scanning read nothing else. The folder holds plain `.npy` files:

    tokens.npy   int32, all documents end to end
    bounds.npy   int64, document i is tokens[bounds[i]:bounds[i + 1]]
    users.npy    int32, the number of document i's user
    spans.npy    int32 (tokens, 2), a token's characters in its document; only where asked for
    info.json    user names by number, fingerprints of the text and of the tokenizer

Document i is row i of the corpus it came from.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus:
    """Documents as token ids, each with its user's number."""

    tokens: np.ndarray
    bounds: np.ndarray
    users: np.ndarray
    user_names: list[str]
    corpus_fingerprint: str
    tokenizer_fingerprint: str
    spans: np.ndarray | None = None

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

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]


def open_tokenized(folder: Path) -> TokenizedCorpus:
    """The corpus stored in `folder`, mapped rather than read."""
    info_file = folder / "info.json"
    if not info_file.exists():
        raise UsageError(f"{folder} holds no tokenised corpus (no info.json). Run: tightlip prepare")
    info = read_json(info_file)
    spans = folder / "spans.npy"
    return TokenizedCorpus(
        tokens=_mapped(folder / "tokens.npy"),
        bounds=_mapped(folder / "bounds.npy"),
        users=_mapped(folder / "users.npy"),
        spans=_mapped(spans) if spans.exists() else None,
        user_names=info["user_names"],
        corpus_fingerprint=info["corpus_fingerprint"],
        tokenizer_fingerprint=info["tokenizer_fingerprint"],
    )


def _mapped(path: Path) -> np.ndarray:
    # An empty file cannot be mapped; np.asarray drops the memmap class, which numba does not know.
    with path.open("rb") as stream:
        np.lib.format.read_magic(stream)
        shape, _, _ = np.lib.format.read_array_header_1_0(stream)
    return np.load(path) if 0 in shape else np.asarray(np.load(path, mmap_mode="r"))
