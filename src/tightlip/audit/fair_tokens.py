"""Tokens by which members and non-members may be compared where the vocabulary came from training.

A word vocabulary is built on the training part, so a rare word of a training document is in it
because of that document, while a held-out document's rare words are <unk>. Rare words are hard to
predict and <unk> is easy: the members look unknown to a model that never saw either. On the
bundled plays such a model had an AUC of 0.395 (0.373 to 0.417) where chance is 0.5, which hides as
much leakage. So a token counts only if its word would be in the vocabulary without the document it
stands in (without its user, where whole users were held out), and <unk> never does. For held-out
text that is every known word. With this the same model had 0.512 (0.489 to 0.535).
Where whole users were held out, it was 0.221 for users without and 0.540 (0.422 to 0.650) with it.
"""

from collections.abc import Collection, Iterator

import numpy as np

from tightlip.corpus.tokens import TokenizedCorpus

_NONE = 2**40
_TOGETHER = 1_000_000  # tokens looked at in one go


def fair_tokens(
    train: TokenizedCorpus,
    held: TokenizedCorpus,
    *,
    by_user: bool,
    leaves_out_rare: bool,
    always: Collection[int],
    never: Collection[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of training and of held-out text count: one bool each.

    `always` are in the vocabulary whoever writes them (digits), `never` are no words, and
    `leaves_out_rare` tells whether not every word of the training text is in it.

    Holds:
        left_out: without the document (or user), a counted word would still be as frequent as
            words had to be.
    """
    size = 1 + max(int(corpus.tokens.max(initial=0)) for corpus in (train, held))
    totals = _totals(train.tokens, size)
    special = np.isin(np.arange(size), [*always, *never])
    needed = 1
    if leaves_out_rare:
        # Of the words as rare as the rarest known, such a vocabulary has some and lacks others.
        needed = 1 + totals[~special & (totals > 0)].min(initial=_NONE)
    counts = np.zeros(train.num_tokens, dtype=bool)
    for places, units in _by_unit(train, by_user):
        words = train.tokens[places].astype(np.int64)
        _, which, inside = np.unique(units * size + words, return_inverse=True, return_counts=True)
        counts[places] = totals[words] - inside[which] >= needed
    known = (totals >= needed)[held.tokens]
    for mask, tokens in ((counts, train.tokens), (known, held.tokens)):
        mask[np.isin(tokens, [*always])] = True
        mask[np.isin(tokens, [*never])] = False
    return counts, known


def _totals(tokens: np.ndarray, size: int) -> np.ndarray:
    totals = np.zeros(size, dtype=np.int64)
    for start in range(0, len(tokens), _TOGETHER):
        totals += np.bincount(tokens[start : start + _TOGETHER], minlength=size)
    return totals


def _by_unit(corpus: TokenizedCorpus, by_user: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places of tokens, and the unit of each, some whole units at a time."""
    units = np.asarray(corpus.users) if by_user else np.arange(corpus.num_documents)
    order = np.argsort(units, kind="stable")
    lengths = np.diff(corpus.bounds)[order]
    ends = (np.flatnonzero(np.diff(units[order], append=-1)) + 1).tolist()
    before = np.concatenate([[0], np.cumsum(lengths)])
    first = 0
    for end in ends:
        if before[end] - before[first] < _TOGETHER and end < len(order):
            continue
        documents, sizes = order[first:end], lengths[first:end]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        yield (
            np.repeat(corpus.bounds[documents], sizes) + within,
            np.repeat(units[documents].astype(np.int64), sizes),
        )
        first = end
