"""What a mitigation is: a way to take a step, and an honest word about what it promises."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers.modeling_utils import PreTrainedModel

from tightlip.core.processes import Processes
from tightlip.training.batches import Batch, Rows, gather
from tightlip.training.config import MitigationConfig, RunOptions, TrainConfig
from tightlip.training.losses import Forward
from tightlip.training.together import Part

if TYPE_CHECKING:
    from tightlip.corpus.privacy_weights import PrivacyWeights

LEDGER_KEYS = (
    *("mechanism", "epsilon", "delta", "unit", "adjacency", "sampling", "accountant", "steps"),
    *("standing", "because", "covers", "outside"),
)
FIXED_WIDTHS = (4, 2, 1)  # parts of the sequence length; each is compiled or captured once


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """What a guarantee must know of the corpus: how it was made, and what was told of it before.

    `history` is what its text came through before, the settings of earlier preparations.
    `text_fingerprint` is private; `name` is random and may be published. `weights` are the
    documents' privacy weights where they were asked for, and private but for how they were made.
    `people` are the random ids of those who wrote it; `folder` is None before it is prepared.
    `is_trial` says that the run is one of several, which promises nothing by itself.
    """

    text_fingerprint: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    releases: list[dict[str, Any]] = field(default_factory=list)
    learnt_vocabulary: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    sources: frozenset[str] = frozenset()  # fingerprints of the text it was made and cut from
    weights: "PrivacyWeights | None" = None
    people: tuple[str, ...] = ()
    folder: Path | None = None
    has_co_owners: bool = False  # whether a text has several owners
    is_trial: bool = False

    @property
    def validation_is_public(self) -> bool:
        """Whether validation is on text that was declared public."""
        return self.settings.get("public_validation") is not None

    @property
    def marks(self) -> set[str]:
        """All that it is known by."""
        return {*self.sources, *self.people, self.text_fingerprint, self.name} - {""}


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a mitigation is given before the first step."""

    model: PreTrainedModel
    forward: Forward
    optimizer: Optimizer
    rows: Rows
    config: TrainConfig
    options: RunOptions
    device: torch.device
    folder: Path
    corpus: CorpusFacts
    steps_per_epoch: int
    num_steps: int
    processes: Processes = field(default_factory=Processes)

    @cached_property
    def targets_per_batch(self) -> float:
        """How many targets a batch has on average."""
        return float(self.rows.num_targets.sum()) / self.steps_per_epoch

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that batches of fixed shape may have, smallest first."""
        return tuple(-(-self.config.sequence_length // part) for part in FIXED_WIDTHS)

    def part(self, num_rows: int) -> Part:
        """What this process runs of a batch of `num_rows`."""
        return Part.of(num_rows, self.processes)

    def batch(self, chosen: np.ndarray) -> Batch:
        """The chosen rows where the model is."""
        widths = self.widths if self.options.compile else ()
        return gather(self.rows, chosen, widths=widths).to(self.device)


class Mitigation(Protocol):
    """One way to train. The loop says which step is due, and the mitigation takes it.

    A mitigation that needs randomness of its own, a second model or an accountant keeps it
    itself; `state_dict` is what a resumed run gives back to it. What has a body here is that of one
    which asks nothing and has nothing to say.
    """

    config_kind: type[MitigationConfig]

    def check(self, config: TrainConfig, corpus: CorpusFacts) -> None:
        """Refuse what the promise cannot bear, before anything is written."""

    def steps_per_epoch(self, rows: Rows, config: TrainConfig) -> int:
        """How many steps see as much as all rows."""

    def prepare(self, context: RunContext) -> None:
        """Look at the run before its first step, and refuse what cannot work."""

    def step(self, number: int) -> tuple[Tensor, int]:
        """Take step `number`, counted from 0: its mean loss in nats, detached, and its targets."""

    def may_go_on(self) -> bool:
        """Whether another step may be taken at all."""
        return True

    def settle(self) -> None:
        """Called before any weights reach the disk."""

    def told_loss(self, held_out: Rows) -> float | None:
        """The mean loss of held-out text as it may be told; None where none is."""
        return None

    def progress_words(self) -> str:
        """A word for the progress line; empty where there is nothing to say."""
        return ""

    def guarantee(self, num_steps: int, *, ended: bool = True) -> dict[str, Any]:
        """What may be said of the weights after `num_steps` steps, under all `LEDGER_KEYS`; of a
        snapshot, after which training goes on, where it has not `ended`."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...
