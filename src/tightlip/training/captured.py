"""Plain gradients of our LSTMs and GRUs with a term on their last states, as one CUDA graph.

Everything a regulariser does in a step, its discriminator's move included, is replayed with the
rest: hundreds of small kernels that wait for nobody. Rows that only the term needs run through
the recurrent layers beside the others, which costs a GPU little, and never through the output
layer. Shapes: X rows that run, B of them with targets, T positions, H hidden units.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tightlip.privacy.clipping import trainable_parameters
from tightlip.privacy.passes import captured, plain_sums
from tightlip.privacy.row_losses import RowLosses
from tightlip.privacy.watching import Watch
from tightlip.training.losses import Selected


@dataclass(frozen=True, eq=False, kw_only=True)
class StateBatch:
    """The first B of X rows have targets; `last_X` is where each row's last input stands.

    `more` is what the term takes beside the last states.
    """

    ids_XT: Tensor
    last_X: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    more: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids_XT, self.last_X, self.targets_BT, self.weights_BT, *self.more)


class StatePasses:
    """Gradients of Σ weight · cross-entropy + term(last states), by parameter, and each row's loss.

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

    def __call__(self, batch: StateBatch) -> tuple[dict[str, Tensor], Tensor]:
        if batch.ids_XT.device.type != "cuda":
            return self._gradients(*batch.tensors)
        key = tuple(tensor.shape for tensor in batch.tensors)
        if key not in self._ready:
            self._ready[key], self._pool = captured(
                self._gradients, batch.tensors, warm_up=self._try_out, pool=self._pool
            )
        return self._ready[key](batch.tensors)

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
        below, above = (
            Watch(self.parameters, len(ids), ids.shape[1]) for ids in (ids_XT, targets_BT)
        )
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
