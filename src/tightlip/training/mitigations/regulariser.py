"""What the two privacy regularisers share: plain training plus λ times a term on last states.

The last state h_x of a row x is the hidden state at its last input, the one that predicts its
last token. In several processes each runs its rows, and all have everybody's last states: the term is
the same everywhere, and so is what an adversary learns from it.

Shapes: B rows, X of them and their partners, T positions, H hidden units.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tightlip.core.devices import moved
from tightlip.core.errors import UsageError
from tightlip.core.settings import setting
from tightlip.privacy.clipping import trainable_parameters
from tightlip.privacy.passes import captured, plain_sums
from tightlip.privacy.row_losses import RowLosses
from tightlip.privacy.watching import Watch
from tightlip.training.batches import Rows, TokenRows, filled
from tightlip.training.config import MitigationConfig, TrainConfig
from tightlip.training.losses import Selected, is_recurrent
from tightlip.training.mitigations import RunContext
from tightlip.training.mitigations.none import NoMitigation
from tightlip.training.together import states_of_all


class StatePasses:
    """Gradients of Σ weight · cross-entropy + term(last states), by parameter, and each row's loss.

    A call takes ids_XT, last_X, targets_BT, weights_BT and what the term takes more: the first B
    of X rows have targets, and `last_X` is where each row's last input stands.
    `term(last_XH, *more)` gives what is added to the loss and may change tensors of its own,
    which `own_state` lists: they are put back after the trial runs that a capture needs.
    Results live in memory that the next call overwrites.

    Holds:
        plain: the gradients are autograd's.
        same_either_way: captured or not, the numbers are the same.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        term: Callable[..., Tensor],
        own_state: Callable[[], list[Tensor]],
        *,
        bf16: bool = False,
    ) -> None:
        self.model, self.term, self.own_state, self.bf16 = model, term, own_state, bf16
        self.parameters = trainable_parameters(model)
        self._ready: dict[Any, Callable[[tuple[Tensor, ...]], Any]] = {}
        self._pool: Any = None

    def __call__(self, *tensors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if tensors[0].device.type != "cuda":
            return self._gradients(*tensors)
        key = tuple(tensor.shape for tensor in tensors)
        if key not in self._ready:
            self._ready[key], self._pool = captured(
                self._gradients, tensors, warm_up=self._try_out, pool=self._pool
            )
        return self._ready[key](tensors)

    def _try_out(self, *tensors: Tensor) -> None:
        before = [(tensor, tensor.detach().clone()) for tensor in self.own_state()]
        self._gradients(*tensors)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)

    def _gradients(
        self, ids_XT: Tensor, last_X: Tensor, targets_BT: Tensor, weights_BT: Tensor, *more: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        # The output layer sees fewer rows than the layers below, so each is watched by itself.
        below, above = (Watch(self.parameters, *ids.shape) for ids in (ids_XT, targets_BT))
        with torch.enable_grad(), self._precision():
            with below:
                hidden_XTH = self.model.model(input_ids=ids_XT, use_cache=False).last_hidden_state
            with above:
                logits_BTV = self.model.lm_head(hidden_XTH[: len(targets_BT)])
            losses_B = RowLosses.apply(logits_BTV, targets_BT, weights_BT, above)
            last_XH = Selected.apply(hidden_XTH.flatten(0, 1), last_X).float()
        with torch.enable_grad():
            total = losses_B.sum() + self.term(last_XH, *more)
            # The layers note what gradients are made of; what comes back here is nothing.
            torch.autograd.grad(total, [below.anchor, above.anchor], allow_unused=True)
        uses = {name: below.uses[name] + above.uses[name] for name in self.parameters}
        with torch.no_grad():
            gradients = plain_sums(uses, self.parameters)
        below.forget()
        above.forget()
        return gradients, losses_B.detach()

    def _precision(self) -> AbstractContextManager:
        if not self.bf16:
            return nullcontext()
        # Autocast's cache would hand one capture's copies of weights to the next.
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16, cache_enabled=False)


# What a step's term takes beside its rows' last states: partners, whose states come behind theirs,
# and arrays. Beyond the real rows all of them say so.
Drawn = tuple[np.ndarray, tuple[np.ndarray, ...]]


@dataclass(frozen=True, kw_only=True)
class RegulariserConfig(MitigationConfig):
    """What both regularisers are asked for."""

    takes_whole_batches: ClassVar[bool] = False
    takes_split_weights: ClassVar[bool] = False
    strength_setting: ClassVar[str | None] = "privacy_weight"

    privacy_weight: float = setting(1.0, "The paper's λ.", at_least=0)
    privacy_warmup_steps: int = setting(0, "Steps over which it rises to that.", at_least=0)
    batching: str = setting(
        "user", "A batch holds one user's rows, or any.", choices=("user", "uniform")
    )


class Regulariser(NoMitigation, ABC):
    """Plain training whose loss has a term more: L = L_CE + λ · L_P.

    As each batch's loss counts by its share of targets, its term counts by its share of rows.

    Holds:
        untouched: with λ = 0 and uniform batches, the weights of plain training bit for bit.
        same_either_way: on a GPU a recurrent model's step is a CUDA graph, and the same step.
    """

    authors: np.ndarray  # of each row, counted from 0 without gaps
    num_authors: int
    # Sums over the epoch under way, kept where the model is so that no step waits for them.
    tallied: tuple[str, ...]
    sums: Tensor

    def batches_by_user(self, config: TrainConfig) -> bool:
        return _settings(config).batching == "user"

    def steps_per_epoch(self, rows: Rows, config: TrainConfig) -> int:
        if not self.batches_by_user(config):
            return super().steps_per_epoch(rows, config)
        rows_of_user = np.unique(rows.users, return_counts=True)[1]
        return int((-(-rows_of_user // config.batch_size)).sum())

    def prepare(self, context: RunContext) -> None:
        self.context = context
        users, self.authors = np.unique(context.rows.users, return_inverse=True)
        self.num_authors = len(users)
        if self.num_authors < 2:
            raise UsageError(
                f"mitigation={self.config_kind.name!r} hides who of several people wrote a text, and all {len(context.rows)} rows "
                f"have one author. Use a corpus of at least two users, or leave the mitigation out."
            )
        self.sums = torch.zeros(len(self.tallied), dtype=torch.float64, device=context.device)
        self.source = TokenRows(context.rows, np.arange(len(context.rows)))
        self.states: StatePasses | None = None
        is_alone = not context.processes.are_several  # no graph waits for other processes
        if context.device.type == "cuda" and is_recurrent(context.model) and is_alone:
            self.states = StatePasses(
                context.model, self._weighted_term, self.own_state, bf16=context.options.bf16
            )

    def step(self, number: int) -> tuple[Tensor, int]:
        loss, num_targets = super().step(number)
        self.look(number)
        self._tell_if_due(number)
        return loss, num_targets

    def gradients(self, number: int, chosen: np.ndarray) -> tuple[Tensor, int]:
        rows_per_batch = len(self.context.rows) / self.context.steps_per_epoch
        weight = self.weight(number) * len(chosen) / rows_per_batch
        if self.states is None:
            return self._direct_gradients(number, chosen, weight)
        return self._graph_gradients(self.states, number, chosen, weight)

    def _direct_gradients(
        self, number: int, chosen: np.ndarray, weight: float
    ) -> tuple[Tensor, int]:
        context, part = self.context, self.context.part(len(chosen))
        batch = context.batch(chosen[part.run])
        num_targets = batch.num_targets * part.counts
        partners, drawn = self.drawn(number, chosen, len(chosen))
        arrays = [torch.from_numpy(array).to(context.device) for array in drawn]
        context.optimizer.zero_grad(set_to_none=True)
        loss, own_KH = context.forward.mean_loss_and_last(batch)
        whole = loss * (num_targets / context.targets_per_batch)
        last_BH = states_of_all(context.processes, own_KH, part, len(chosen))
        self.teach(last_BH.detach(), *arrays)
        if weight:
            if len(partners):
                own_KH = context.forward.last(context.batch(partners[part.run]))
                beside_BH = states_of_all(context.processes, own_KH, part, len(chosen))
                last_BH = torch.cat([last_BH, beside_BH])
            whole = whole + weight * self.term(last_BH, *arrays)
        whole.backward()
        return loss, num_targets

    def _graph_gradients(
        self, states: StatePasses, number: int, chosen: np.ndarray, weight: float
    ) -> tuple[Tensor, int]:
        """The same in one graph, whose shapes are fixed: batches are filled up with nobody."""
        context, size = self.context, self.context.config.batch_size
        partners, arrays = self.drawn(number, chosen, size)
        rows_X = np.concatenate([filled(chosen, size, -1), partners])
        num_targets_X = np.where(rows_X < 0, 1, self.source.lengths[rows_X])
        width = min(width for width in context.widths if width >= num_targets_X.max())
        ids_XT, targets_XT = self.source.gather(rows_X, width)
        last_X = np.arange(len(rows_X)) * width + num_targets_X - 1
        more = [torch.tensor(weight, dtype=torch.float32), *map(torch.from_numpy, arrays)]
        ids_XT, last, targets_BT, *more = (
            moved(each, context.device)
            for each in (ids_XT, torch.from_numpy(last_X), targets_XT[:size], *more)
        )
        weights_BT = (targets_BT >= 0) / context.targets_per_batch
        gradients, losses_B = states(ids_XT, last, targets_BT, weights_BT, *more)
        for name, parameter in states.parameters.items():
            parameter.grad = gradients[name]
        num_targets = int(context.rows.num_targets[chosen].sum())
        return losses_B.sum() * (context.targets_per_batch / num_targets), num_targets

    def _weighted_term(self, last_XH: Tensor, weight: Tensor, *arrays: Tensor) -> Tensor:
        """What a graph adds to the loss: it cannot leave the term out where the weight is 0."""
        self.teach(last_XH.detach(), *arrays)
        return weight * self.term(last_XH, *arrays)

    def weight(self, number: int) -> float:
        """λ at a step: it rises in a line to its full size over the warm-up."""
        settings = _settings(self.context.config)
        warmup = settings.privacy_warmup_steps
        return settings.privacy_weight * (min(1.0, number / warmup) if warmup else 1)

    @abstractmethod
    def drawn(self, number: int, chosen: np.ndarray, size: int) -> Drawn:
        """What the term of a step needs, for a batch of `size` rows of which `chosen` are real."""

    @abstractmethod
    def term(self, last_XH: Tensor, *arrays: Tensor) -> Tensor:
        """L_P of a batch as a mean over its rows; torch operations only, whatever the values."""

    def teach(self, last_XH: Tensor, *arrays: Tensor) -> None:
        """Let an adversary learn from the states before the model answers to it."""

    def look(self, number: int) -> None:
        """See after a step whether something must be said at once."""

    @abstractmethod
    def tell(self, epoch: int, sums: dict[str, float]) -> None:
        """Log what an epoch's sums say."""

    def own_state(self) -> list[Tensor]:
        """Every tensor that a step changes beside the model and its optimizer."""
        return [self.sums]

    def tally(self, **values: Tensor) -> None:
        """Add to the epoch's sums; the names stand in `tallied` one after the other."""
        first = self.tallied.index(next(iter(values)))
        assert self.tallied[first : first + len(values)] == tuple(values)
        added = torch.stack([value.detach().float() for value in values.values()])
        self.sums[first : first + len(values)] += added

    def _tell_if_due(self, number: int) -> None:
        done, steps_per_epoch = number + 1, self.context.steps_per_epoch
        if done % steps_per_epoch == 0 or done == self.context.num_steps:
            sums = dict(zip(self.tallied, self.sums.tolist(), strict=True))
            self.tell(-(-done // steps_per_epoch), sums)
            self.sums.zero_()

    def guarantee(self, num_steps: int, *, ended: bool = True) -> dict[str, Any]:
        return super().guarantee(num_steps, ended=ended) | {
            "mechanism": f"{self.config_kind.name} regulariser",
            "because": "A privacy regulariser steers the weights away from telling authors apart but bounds nobody's "
            "influence on them; only audits say what they give away.",
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.sums.copy_(state["sums"])


def _settings(config: TrainConfig) -> RegulariserConfig:
    return cast(RegulariserConfig, config.mitigation)
