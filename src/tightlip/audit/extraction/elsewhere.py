"""How far the text at every place of a corpus also stands in text that its owner does not own.

A window is its owner's alone if it is longer than that: one figure for each place answers for
windows of all lengths. In a suffix array the neighbours of a place share most with it, and of those
that are somebody else's the nearest share most; two walks over the array find them.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from tightlip.audit.leakage.counting import Shard, edges_of, indexed
from tightlip.core.errors import UsageError
from tightlip.corpus.tokens import TokenizedCorpus

# What is held of a token at most: text, symbols, both suffix arrays, and what is shared.
_BYTES_PER_TOKEN = 40
_MOST_TOKENS = 2**31 // 3  # that the suffix sorter's symbols of three bytes may be


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """`shared` has, for each document and each of its owners, a figure for
    every token and one more; `begins` is where those of a document's first owner begin.

    Documents are asked for by their number behind the first `num_before`."""

    shared: np.ndarray
    begins: np.ndarray
    num_owners: np.ndarray  # of each document
    num_before: int = 0

    def at(self, documents: np.ndarray, owners: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Of places counted from their document's beginning; `owners` counts a document's own."""
        documents = documents + self.num_before
        first = self.begins[documents]
        sizes = (self.begins[documents + 1] - first) // self.num_owners[documents]
        return self.shared[first + owners * sizes + places]


def check_memory(num_tokens: int, memory_bytes: int) -> None:
    """Refuse a corpus whose places cannot be sorted within the memory given."""
    needed = num_tokens * _BYTES_PER_TOKEN
    if needed > memory_bytes or num_tokens > _MOST_TOKENS:
        raise UsageError(
            f"To find whom each window of {num_tokens:,} tokens belongs to takes {needed:,} bytes, and --memory leaves "
            f"{memory_bytes:,}. Raise --memory, or give a part of the corpus with whole users."
        )


def longest_elsewhere(
    corpus: TokenizedCorpus, most: int, before: TokenizedCorpus | None = None
) -> Elsewhere:
    """For every place and owner, the most tokens from there on that others have too; to them belongs
    everybody of the corpus `before`.

    Holds:
        brute_force: the same as comparing every place with every place of others.
        several_owners: somebody who owns a document is no other to it.
    """
    corpora = [corpus] if before is None else [before, corpus]
    tokens = np.concatenate([one.tokens for one in corpora])
    lengths = np.concatenate([np.diff(one.bounds) for one in corpora])
    documents, owners = map(np.asarray, corpora[0].owned())
    num_before = 0
    if before is not None:  # nobody of one is somebody of the other, whatever their names
        num_before, (own, theirs) = before.num_documents, corpus.owned()
        documents = np.append(documents, own + num_before)
        owners = np.append(owners, theirs + before.num_users)
    num_owners = np.bincount(documents, minlength=len(lengths))
    sizes, bounds, nobody = lengths + 1, edges_of(lengths), np.zeros(len(lengths), np.int32)
    text, ranks = indexed(Shard(tokens=tokens, bounds=bounds, users=nobody, starts=bounds))
    begins = edges_of(sizes * num_owners)
    shared = np.zeros(begins[-1], dtype=np.uint16)
    common = _common(text, ranks, most)
    document_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    about = (edges_of(sizes), edges_of(num_owners), owners.astype(np.int32), begins)
    for is_back in (False, True):
        _walk(ranks, common, document_of, *about, int(num_owners.max(initial=1)), is_back, shared)
    return Elsewhere(shared=shared, begins=begins, num_owners=num_owners, num_before=num_before)


@njit(cache=True, nogil=True)
def _common(text, ranks, most):  # type: ignore[no-untyped-def]
    """How much the text at each rank shares with that before it, within documents."""
    common = np.zeros(len(ranks) + 1, dtype=np.uint16)
    for rank in range(1, len(ranks)):
        one, other = ranks[rank - 1], ranks[rank]
        room = min(most, len(text) - max(one, other))
        size = 0
        while size < room and text[one + size] == text[other + size] and text[one + size] != 0:
            size += 1
        common[rank] = size
    return common


@njit(cache=True, nogil=True)
def _walk(ranks, common, document_of, edges, owner_edges, owners, begins, most_owners, is_back, shared):  # type: ignore[no-untyped-def]  # fmt: skip
    """What a place shares with the nearest that is not its owner's is either what it shares with
    the one before it, or where that is the owner's too, no more than that one shares with others."""
    last, here = np.zeros(most_owners, np.uint16), np.zeros(most_owners, np.uint16)
    before = -1
    for step in range(len(ranks)):
        rank = len(ranks) - 1 - step if is_back else step
        link = common[rank + 1] if is_back else common[rank]
        document = document_of[ranks[rank]]
        size = edges[document + 1] - edges[document]
        place = begins[document] + ranks[rank] - edges[document]
        first, end = owner_edges[document], owner_edges[document + 1]
        for slot in range(end - first):
            value = link if before >= 0 else np.uint16(0)
            if before >= 0:
                for other in range(owner_edges[before], owner_edges[before + 1]):
                    if owners[other] == owners[first + slot]:
                        value = min(value, last[other - owner_edges[before]])
            here[slot] = value
            shared[place + slot * size] = max(shared[place + slot * size], value)
        last, here = here, last
        before = document
