"""Rows to train on: a corpus' own, or documents given as tensors. Shapes: B rows, T positions."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tightlip.core.errors import UsageError
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.sampling import PER_OWNER, ownership_of


class Source(Protocol):
    """Rows to train on: whose each is, how long, and the rows themselves. Where texts have several
    owners it also has their `ownership`, and a row's unit is its document."""

    unit_of_row: np.ndarray
    lengths: np.ndarray
    fingerprint: str

    def gather(self, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        """Ids and targets [B, T] of the rows; a row of -1 is padding without a target."""


class LabelledRows:
    """Rows of ids, and of labels that need not be the ids: a label stands at its id's place, and
    NO_LABEL where nothing is to be learnt."""

    def __init__(
        self, ids: Sequence[np.ndarray], labels: Sequence[np.ndarray], users: Sequence[Any] | None
    ) -> None:
        counts = np.array([len(row) for row in ids])
        if len(counts) != len(labels) or any(
            len(row) != count for row, count in zip(labels, counts, strict=True)
        ):
            raise UsageError("There are not as many labels as ids in every row. Give one for each.")
        if users is not None and len(users) != len(counts):
            raise UsageError(
                f"{len(users)} users for {len(counts)} rows. Give one user for each row."
            )
        fed, told = (np.concatenate(rows) for rows in (ids, labels))
        asked = np.concatenate([fed, told[told != NO_LABEL]])
        self.smallest_id, self.largest_id = int(asked.min(initial=0)), int(asked.max(initial=0))
        self._ids, self._labels = fed.astype(np.int32), told.astype(np.int32)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self.lengths = np.maximum(1, counts - 1)  # the last id is only predicted, never fed
        self.unit_of_row = np.arange(len(counts))
        self.ownership = ownership_of(users)
        if users is not None and self.ownership is None:
            places: dict[str, int] = {}
            self.unit_of_row = np.array([places.setdefault(user, len(places)) for user in users])
        # A hash of the text in a ledger would tell who is in it.
        self.fingerprint = ""

    def gather(self, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full((len(rows), width), NO_LABEL)
        for place, row in enumerate(rows):
            start, end = self._starts[row], self._ends[row]
            if row >= 0 and end > start:  # a row of one id predicts nothing
                ids[place, : end - start - 1] = torch.from_numpy(self._ids[start : end - 1])
                targets[place, : end - start - 1] = torch.from_numpy(self._labels[start + 1 : end])
        return ids, targets


class Documents(LabelledRows):
    """Documents as tensors of ids, each read whole."""

    def __init__(self, documents: Sequence[Tensor], users: Sequence[Any] | None) -> None:
        if users is not None and len(users) != len(documents):
            raise UsageError(
                f"{len(users)} users for {len(documents)} documents. Give one user for each document."
            )
        if not len(documents):
            raise UsageError("There are no documents to train on.")
        ids = [torch.as_tensor(each, dtype=torch.long).cpu().numpy() for each in documents]
        if (shape := next((each.shape for each in ids if each.ndim != 1), None)) is not None:
            raise UsageError(
                f"A document has the shape {shape}, and has to be one line of ids. Give each by itself, such as encoded[0]."
            )
        super().__init__(ids, ids, users)
        if users is not None and self.ownership is None:
            names = np.array([str(user) for user in users])
            self.unit_of_row = np.unique(names, return_inverse=True)[1]


def sampled_units(source: Source, per_owner: int | None) -> np.ndarray:
    """What each step samples from: all units that have rows; of texts with several owners the
    documents that are taken, also those without rows."""
    if (ownership := getattr(source, "ownership", None)) is not None:
        return np.asarray(ownership.taken(per_owner or PER_OWNER))
    if per_owner is not None:
        raise UsageError(
            f"documents_per_owner={per_owner} is for texts with several owners, and here each has one, whose texts are drawn "
            "together. Leave it out; rows_per_unit bounds how many a step takes."
        )
    return np.unique(source.unit_of_row)


def source_of(documents: Source | Sequence[Tensor], users: Sequence[Any] | None) -> Source:
    if hasattr(documents, "unit_of_row"):
        return documents  # type: ignore[return-value]
    return Documents(documents, users)  # type: ignore[arg-type]
