"""Tokens by which members and non-members may be compared where the vocabulary came from training.

A word vocabulary is built on the training part, so a rare word of a training document is in it
because of that document, while a held-out document's rare words are <unk>. Rare words are hard to
predict and <unk> is easy: the members look unknown to a model that never saw either. On half of the
bundled plays such a model had an AUC of 0.368 (0.349 to 0.388) where chance is 0.5, which hides as
much leakage. So a token counts only if its word would be in the vocabulary without all that its user
wrote in training, and <unk> never does. With this the same model had 0.500 (0.480 to 0.522); where
whole users were held out, it was 0.278 (0.191 to 0.380) for users without and 0.494 (0.384 to 0.600)
with it.

The user is left out on both sides, though a held-out document brought no word in itself. Leaving out
the document alone turns the error round: of three documents a user a member's word was looked for in
one other, a held-out document's in two, and a model that saw nothing had an AUC of 0.59 to 0.63.

What does not count is what one user alone wrote, the most private text. A reference model does not
bring it back: two models that never saw a word agree on it only if they were trained alike (see the
log), so its score is over the same tokens.
"""

from collections.abc import Collection, Iterator

import numpy as np

from tightlip.corpus.tokens import TokenizedCorpus

_NONE = 2**40
_TOGETHER = 1_000_000  # tokens looked at in one go

# Where some users' tokens stand, and the user of each.
Places = tuple[np.ndarray, np.ndarray]


def fair_tokens(
    train: TokenizedCorpus,
    held: TokenizedCorpus,
    *,
    leaves_out_rare: bool,
    min_users: int = 1,
    always: Collection[int],
    never: Collection[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of training and of held-out text count: one bool each.

    `always` are in the vocabulary whoever writes them (digits), `never` are no words,
    `leaves_out_rare` tells whether the rarest words of the training text were cut off, and
    `min_users` is how many users a word of the vocabulary takes.

    Holds:
        left_out: without any training text of the user who wrote it, a counted word would still
            be as frequent, and of as many users, as words had to be.
        same_for_both: of a user's words the same count in training and in held-out text.
    """
    size = 1 + max(int(corpus.tokens.max(initial=0)) for corpus in (train, held))
    totals, num_users = _totals(train, held, size)
    special = np.isin(np.arange(size), [*always, *never])
    needed = 1
    if leaves_out_rare:
        # Of the words as rare as the rarest known, such a vocabulary has some and lacks others.
        needed = 1 + totals[~special & (totals > 0)].min(initial=_NONE)
    found = np.zeros(train.num_tokens, dtype=bool), np.zeros(held.num_tokens, dtype=bool)
    for sides in _by_user(train, held):
        pairs, times = _pairs(train, sides[0], size)
        for mask, corpus, (places, users) in zip(found, (train, held), sides, strict=True):
            words = corpus.tokens[places].astype(np.int64)
            own = _looked_up(users * size + words, pairs, times)
            by_others = num_users[words] - (own > 0)
            mask[places] = (totals[words] - own >= needed) & (by_others >= min_users)
    for mask, corpus in zip(found, (train, held), strict=True):
        mask[np.isin(corpus.tokens, [*always])] = True
        mask[np.isin(corpus.tokens, [*never])] = False
    return found


def _totals(
    train: TokenizedCorpus, held: TokenizedCorpus, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """How often each word stands in training, and how many users wrote it there."""
    totals, num_users = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for mine, _ in _by_user(train, held):
        pairs, times = _pairs(train, mine, size)
        np.add.at(totals, pairs % size, times)
        num_users += np.bincount(pairs % size, minlength=size)
    return totals, num_users


def _pairs(train: TokenizedCorpus, mine: Places, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each user with each word of theirs as one number, in order, and how often it stands."""
    places, users = mine
    return np.unique(users * size + train.tokens[places], return_counts=True)


def _looked_up(wanted: np.ndarray, pairs: np.ndarray, times: np.ndarray) -> np.ndarray:
    """How often each of `wanted` stands in training; 0 for those that do not."""
    if not len(pairs):
        return np.zeros(len(wanted), dtype=np.int64)
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    return np.where(pairs[at] == wanted, times[at], 0)


def _by_user(train: TokenizedCorpus, held: TokenizedCorpus) -> Iterator[tuple[Places, Places]]:
    """The places of both corpora, some whole users at a time; a user is known by name."""
    names = {name: number for number, name in enumerate(train.user_names)}
    numbers = [names.setdefault(name, len(names)) for name in held.user_names]
    owners = np.asarray(train.users, np.int64), np.array(numbers, np.int64)[held.users]
    lengths = np.diff(train.bounds), np.diff(held.bounds)
    num_tokens = sum(
        np.bincount(mine, size, len(names)) for mine, size in zip(owners, lengths, strict=True)
    )
    group = (np.cumsum(num_tokens) - num_tokens).astype(np.int64) // _TOGETHER
    orders = [np.argsort(group[mine], kind="stable") for mine in owners]
    for number in np.unique(group):
        train_part, held_part = (
            _places(
                corpus,
                mine,
                order[slice(*np.searchsorted(group[mine[order]], [number, number + 1]))],
            )
            for corpus, mine, order in zip((train, held), owners, orders, strict=True)
        )
        yield train_part, held_part


def _places(corpus: TokenizedCorpus, owners: np.ndarray, documents: np.ndarray) -> Places:
    """Where the tokens of these documents stand, and whose each is."""
    sizes = np.diff(corpus.bounds)[documents]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(corpus.bounds[documents], sizes) + within, np.repeat(owners[documents], sizes)
