"""From documents to padded rows of ids.

A document is read as `<s> w1 … wn`: the tokenizer's BOS where it has one, then its tokens,
then nothing; documents are never joined. Shapes: B rows, T ids, N targets.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.core.devices import moved
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.sampling import Ownership

SORTED_TOGETHER = 50  # batches; sorting more by length saves no padding worth having


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where each row's ids stand in a corpus; nothing is copied ahead.

    Row i is tokens[starts[i] : starts[i] + lengths[i]], after a BOS where begins[i]. Its first
    id is context, every other a target, or of chats those that `trained` marks among the tokens.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    begins: np.ndarray
    users: np.ndarray
    documents: np.ndarray
    bos: int | None
    pad: int
    trained: np.ndarray | None = None
    ownership: Ownership | None = None  # of all documents, where some have several owners

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_inputs(self) -> np.ndarray:
        """How many ids of each row a model is fed."""
        return self.lengths + self.begins - 1

    @cached_property
    def num_targets(self) -> np.ndarray:
        if self.trained is None:
            return self.num_inputs
        before = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        return before[self.starts + self.lengths] - before[self.starts + 1 - self.begins]

    def only(self, chosen: np.ndarray) -> "Rows":
        """Those rows alone."""
        names = ("starts", "lengths", "begins", "users", "documents")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def targets(self) -> np.ndarray:
        """Every id that is predicted, row after row."""
        ends = np.cumsum(self.num_inputs)
        first = self.starts + 1 - self.begins - (ends - self.num_inputs)
        places = np.repeat(first, self.num_inputs) + np.arange(ends[-1])
        if self.trained is not None:
            places = places[self.trained[places] > 0]
        return np.asarray(self.tokens[places], np.int64)

    def fingerprint(self) -> str:
        """SHA-256 of which tokens are rows, whatever the tokens are."""
        digest = hashlib.sha256(f"{self.bos} {self.pad}".encode())
        marks = () if self.trained is None else (self.trained,)
        for part in (self.starts, self.lengths, self.begins, *marks):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def rows_of(
    corpus: TokenizedCorpus,
    *,
    sequence_length: int,
    bos: int | None,
    pad: int | None = None,
    without_users: frozenset[int] = frozenset(),
) -> Rows:
    """Rows of at most `sequence_length` targets, none with none; a corpus that begins itself is given
    no `bos`.

    A long document is cut; each further row begins with the token before it, as context.

    Holds:
        once: every token is a target exactly once, but for a first one without BOS, and for those
            that the corpus says are not trained on.
        left_out: no row holds a token of `without_users`.
    """
    bos = None if corpus.begins_itself else bos
    bounds = np.asarray(corpus.bounds, np.int64)
    of_pair, owners = corpus.owned()
    left_out = np.isin(owners, list(without_users))  # any of a document's owners is enough
    kept = np.bincount(of_pair, left_out, corpus.num_documents) == 0
    has_bos = bos is not None
    num_targets = np.where(kept, np.maximum(np.diff(bounds) - (not has_bos), 0), 0)
    num_rows = -(-num_targets // sequence_length)
    document = np.repeat(np.arange(len(num_rows)), num_rows)
    place = np.arange(len(document)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    first_target = place * sequence_length
    targets = np.minimum(num_targets[document] - first_target, sequence_length)
    begins = (place == 0) & has_bos
    # The context of target t is token t - 1 with a BOS in front, else token t.
    starts = bounds[document] + first_target - (has_bos & ~begins)
    ownership = None
    if corpus.owners is not None and corpus.owner_bounds is not None:
        ownership = Ownership(corpus.owners, corpus.owner_bounds)
    rows = Rows(
        tokens=corpus.tokens,
        starts=starts,
        lengths=(targets + 1 - begins).astype(np.int32),
        begins=begins,
        users=np.asarray(corpus.users)[document],
        documents=document,
        bos=bos,
        pad=0 if pad is None else pad,
        trained=corpus.trained,
        ownership=ownership,
    )
    return rows if rows.trained is None else rows.only(rows.num_targets > 0)


def epoch_order(
    rows: Rows, *, batch_size: int, seed: int, epoch: int, by_user: bool = False
) -> list[np.ndarray]:
    """The rows of each batch of an epoch: shuffled, but rows of like length share a batch; with
    `by_user`, a batch holds rows of one user only.

    Holds:
        once: every row is in exactly one batch, every batch but one is full.
        one_user: by user, one with n rows fills ceil(n / batch_size) batches, all but one full.
        pure: the same seed and epoch give the same order.
    """
    draw = np.random.default_rng([seed, epoch])
    shuffled = draw.permutation(len(rows))
    groups = [shuffled]
    if by_user:
        sorted_rows = shuffled[np.argsort(rows.users[shuffled], kind="stable")]
        groups = np.split(sorted_rows, np.flatnonzero(np.diff(rows.users[sorted_rows])) + 1)
    batches = [batch for own in groups for batch in _of_like_length(rows, own, batch_size)]
    return [batches[place] for place in draw.permutation(len(batches))]


def _of_like_length(rows: Rows, order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Batches in this order, but that of some batches together the rows are sorted by length."""
    batches = []
    for start in range(0, len(order), SORTED_TOGETHER * batch_size):
        block = order[start : start + SORTED_TOGETHER * batch_size]
        block = block[np.argsort(rows.lengths[block], kind="stable")]
        batches += [block[at : at + batch_size] for at in range(0, len(block), batch_size)]
    return batches


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows side by side, padded on the right.

    `input_ids_BT` and `labels_BT` are what transformers calls by these names: a label stands
    where its id stands, -100 at contexts and padding. The model need not be fed a row's last
    id, so we feed `inputs` and compare with `targets`: the id after each input.
    """

    input_ids_BT: Tensor
    labels_BT: Tensor
    places_N: Tensor  # of the targets, in `targets` laid out flat
    target_ids_N: Tensor
    num_inputs_B: Tensor

    @property
    def inputs(self) -> Tensor:
        return self.input_ids_BT[:, :-1]

    @property
    def targets(self) -> Tensor:
        return self.labels_BT[:, 1:]

    @property
    def num_targets(self) -> int:
        return len(self.target_ids_N)

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: moved(part, device) for name, part in vars(self).items()})


def gather(rows: Rows, chosen: np.ndarray, *, widths: tuple[int, ...] = ()) -> Batch:
    """The chosen rows as one batch, as many inputs wide as the smallest of `widths` that fits.

    Without `widths`, or where none fits, it is as wide as its longest row.
    """
    begins_B1 = rows.begins[chosen, None]
    ends_B1 = (rows.lengths[chosen] + rows.begins[chosen])[:, None]
    longest = max(int(ends_B1.max(initial=0)) - 1, 1)
    width = min((width for width in widths if width >= longest), default=longest)
    places_1T = np.arange(width + 1)[None]
    real_BT = places_1T < ends_B1
    where_BT = np.where(real_BT, rows.starts[chosen, None] + places_1T - begins_B1, 0)
    ids_BT = rows.tokens[np.maximum(where_BT, 0)].astype(np.int64)
    ids_BT[~real_BT] = rows.pad
    if rows.bos is not None:
        ids_BT[rows.begins[chosen], 0] = rows.bos
    is_target_BT = real_BT & (places_1T > 0)
    if rows.trained is not None:
        is_target_BT &= rows.trained[np.maximum(where_BT, 0)] > 0
    labels_BT = np.where(is_target_BT, ids_BT, NO_LABEL)
    targets = labels_BT[:, 1:].ravel()
    places_N = np.flatnonzero(targets != NO_LABEL)
    return Batch(
        input_ids_BT=torch.from_numpy(ids_BT),
        labels_BT=torch.from_numpy(labels_BT),
        places_N=torch.from_numpy(places_N),
        target_ids_N=torch.from_numpy(targets[places_N]),
        num_inputs_B=torch.from_numpy(rows.num_inputs[chosen].astype(np.int64)),
    )


def filled(values: np.ndarray, size: int, filler: Any) -> np.ndarray:
    """`values` and behind them as much filler as makes `size` of them.

    >>> filled(np.array([4, 7]), 4, -1)
    array([ 4,  7, -1, -1])
    """
    return np.concatenate([values, np.full(size - len(values), filler, values.dtype)])


class TokenRows:
    """The corpus' rows as private training asks for them: whose each is, in batches of a given width."""

    def __init__(
        self,
        rows: Rows,
        unit_of_row: np.ndarray,
        fingerprint: str = "",
        ownership: Ownership | None = None,
    ) -> None:
        self.rows, self.unit_of_row, self.fingerprint = rows, unit_of_row, fingerprint
        self.ownership = ownership
        self.lengths = np.asarray(rows.num_inputs)

    def gather(self, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        """Ids and targets of `width` positions; a row of -1 is padding without a target."""
        # Padding is nobody's row: were it made of one, that one's words would stand beside a unit,
        # and its length would widen every pass that is not full.
        real = torch.from_numpy(rows >= 0)
        batch = gather(self.rows, rows[rows >= 0], widths=(width,))
        ids_BT = torch.full((len(rows), width), self.rows.pad, dtype=torch.long)
        targets_BT = torch.full_like(ids_BT, NO_LABEL)
        ids_BT[real], targets_BT[real] = batch.inputs, batch.targets
        return ids_BT, targets_BT
