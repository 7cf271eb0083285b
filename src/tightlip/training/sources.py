"""The corpus' rows as private training asks for them: by unit, in batches of a given width."""

import numpy as np
from torch import Tensor

from tightlip.training.batches import NO_LABEL, Rows, gather


class TokenRows:
    """Rows and whose each is."""

    def __init__(self, rows: Rows, unit_of_row: np.ndarray, fingerprint: str = "") -> None:
        self.rows, self.unit_of_row, self.fingerprint = rows, unit_of_row, fingerprint
        self.lengths = np.asarray(rows.num_targets)

    def gather(self, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        """Ids and targets of `width` positions; a row of -1 is padding without a target."""
        batch = gather(self.rows, np.maximum(rows, 0), widths=(width,))
        ids_BT, targets_BT = batch.inputs.contiguous(), batch.targets.clone()
        # Not one word of somebody else: were it not finite under the model, it would take the
        # unit that it pads out with it.
        ids_BT[rows < 0], targets_BT[rows < 0] = self.rows.pad, NO_LABEL
        return ids_BT, targets_BT
