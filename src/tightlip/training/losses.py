"""How a model is run over a batch: losses to train on, scores to validate by.

Shapes: B rows, T inputs, H hidden units, V vocabulary, N targets.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from transformers.modeling_utils import PreTrainedModel

from tightlip.core.processes import Processes
from tightlip.models.causal_lm import CausalLM
from tightlip.models.recurrent import RecurrentForCausalLM
from tightlip.privacy.passes import captured
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.shards import local
from tightlip.training.batches import Batch, Rows, gather
from tightlip.training.together import has_split_weights

# Logits of so many targets stay in a core's cache: 2.2 s an epoch became 1.5 s on two cores.
CHUNK = {"cpu": 512, "cuda": 8192}
POSITIONS = {"cpu": 8192, "cuda": 131_072}  # in one batch that is scored
FOREIGN_LOGITS = {"cpu": 2**25, "cuda": 2**29}  # of a model that makes all its logits at once


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of some targets: summed loss, how many were the model's first choice, how many there are."""

    loss_nats: float
    num_first: int
    num_targets: int


class Forward:
    """One model, run in float32 or bfloat16, compiled or not.

    Holds:
        padding_unseen: the loss does not depend on how far a batch is padded.
        as_transformers: the loss is the one transformers computes from the same labels.
    """

    def __init__(
        self, model: PreTrainedModel, *, bf16: bool = False, compiled_rows: int | None = None
    ) -> None:
        """Batches of `compiled_rows` rows run compiled, others (an epoch's last) as they are."""
        self.model, self.bf16, self.compiled_rows = model, bf16, compiled_rows
        # Split weights come together only when the whole model is called.
        self.reaches_inside = is_ours(model) and not has_split_weights(model)
        self._dense: Callable[..., Tensor] = dense_loss
        if compiled_rows is not None:
            # Earlier models of this process count against torch's limit of recompilations.
            torch.compiler.reset()
            self._dense = torch.compile(dense_loss, dynamic=False)
        self._steps: dict[torch.Size, Callable[[tuple[Tensor, ...]], Any]] = {}
        self._pool: Any = None

    def backward(self, batch: Batch, share: float) -> Tensor:
        """The mean loss; its gradient times `share` becomes that of the parameters."""
        if batch.inputs.device.type == "cuda" and len(batch.inputs) == self.compiled_rows:
            return self._captured_backward(batch, share)
        self.model.zero_grad(set_to_none=True)
        loss = self.mean_loss(batch)
        (loss * share).backward()
        return loss.detach()

    def _captured_backward(self, batch: Batch, share: float) -> Tensor:
        """The same in a CUDA graph: Python launches a Transformer's kernels more slowly than a GPU
        runs them."""
        trained = [each for each in self.model.parameters() if each.requires_grad]

        def run(inputs: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, list[Any]]:
            self.model.zero_grad(set_to_none=True)
            with self._precision():
                loss = self._dense(self.model, inputs, targets)
            (loss * share).backward()
            return loss.detach(), [each.grad for each in trained]

        given = (batch.inputs, batch.targets, torch.tensor(share, device=batch.inputs.device))
        key = batch.inputs.shape
        if key not in self._steps:
            self._steps[key], self._pool = captured(run, given, warm_up=run, pool=self._pool)
        loss, gradients = self._steps[key](given)
        for each, gradient in zip(trained, gradients, strict=True):
            each.grad = gradient
        return loss

    def mean_loss(self, batch: Batch) -> Tensor:
        """The mean loss in nats over the batch's targets, ready to be differentiated."""
        with self._precision():
            if len(batch.inputs) == self.compiled_rows:
                # Compiled code wants fixed shapes, so it computes the padding's logits too.
                return self._dense(self.model, batch.inputs, batch.targets)
            if not self.reaches_inside:
                return cross_entropy(self._foreign_logits(batch), batch.target_ids_N)
            return self._loss_after(self._hidden(batch), batch)

    def mean_loss_and_last(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss, and of the same pass the hidden state at each row's last input."""
        with self._precision():
            if self.reaches_inside:
                hidden_BTH = self._hidden(batch)
                return self._loss_after(hidden_BTH, batch), at_last(hidden_BTH, batch).float()
            outputs = self._foreign(self.model, batch, output_hidden_states=True)
            logits_NV = at_targets(outputs.logits, batch).float()
            last_BH = at_last(outputs.hidden_states[-1], batch).float()
            return cross_entropy(logits_NV, batch.target_ids_N), last_BH

    def last(self, batch: Batch) -> Tensor:
        """The hidden state at each row's last input; the output layer is not run."""
        with self._precision():
            if self.reaches_inside:
                return at_last(self._hidden(batch), batch).float()
            outputs = self._foreign(without_head(self.model), batch)
            return at_last(outputs.last_hidden_state, batch).float()

    @torch.no_grad()  # weights that come together in inference mode could not be trained
    def scores(self, batch: Batch) -> Scores:
        """How well the model predicts the batch's targets; ask it in evaluation mode."""
        loss = torch.zeros((), dtype=torch.float64, device=batch.target_ids_N.device)
        first = torch.zeros((), dtype=torch.int64, device=batch.target_ids_N.device)
        with self._precision():
            for logits_NV, targets_N in self._logits(batch):
                target_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
                loss += (logits_NV.logsumexp(dim=1) - target_N).double().sum()
                # Of equals all are first: a token is when none has a strictly higher logit.
                first += (target_N >= logits_NV.amax(dim=1)).sum()
        return Scores(
            loss_nats=loss.item(), num_first=int(first.item()), num_targets=batch.num_targets
        )

    def _logits(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits in float32 with their targets, some hundreds at a time."""
        size, ours = CHUNK.get(batch.target_ids_N.device.type, 512), self.reaches_inside
        whole_NX = at_targets(self._hidden(batch), batch) if ours else self._foreign_logits(batch)
        for part_NX, targets_N in zip(
            whole_NX.split(size), batch.target_ids_N.split(size), strict=True
        ):
            yield (self.model.lm_head(part_NX) if ours else part_NX).float(), targets_N

    def _hidden(self, batch: Batch) -> Tensor:
        # Padding stands on the right and our models look left only: no mask is needed.
        return self.model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state

    def _loss_after(self, hidden_BTH: Tensor, batch: Batch) -> Tensor:
        hidden_NH, head = at_targets(hidden_BTH, batch), self.model.lm_head
        if hidden_NH.device.type == "cpu" and not self.bf16:
            return ChunkedLoss.apply(hidden_NH, head.weight, head.bias, batch.target_ids_N)
        return cross_entropy(head(hidden_NH).float(), batch.target_ids_N)

    def _foreign_logits(self, batch: Batch) -> Tensor:
        # Other models may scale or cap their logits, so only they know how to make them.
        return at_targets(self._foreign(self.model, batch).logits, batch).float()

    def _foreign(self, model: nn.Module, batch: Batch, **more: Any) -> Any:
        places_T = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
        real_BT = (places_T <= batch.num_inputs_B[:, None]).to(batch.inputs.dtype)
        return model(input_ids=batch.inputs, attention_mask=real_BT, use_cache=False, **more)

    def _precision(self) -> AbstractContextManager:
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16)


def is_ours(model: nn.Module) -> bool:
    """Whether the logits are `lm_head` of the base model's last hidden state, nothing more."""
    # Adapters wrap a model: what they wrap is ours, they are not.
    return isinstance(model, CausalLM)


def is_recurrent(model: nn.Module) -> bool:
    """Whether the model is one of our own LSTMs and GRUs."""
    return isinstance(model, RecurrentForCausalLM)


def dense_loss(model: PreTrainedModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    return cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=NO_LABEL
    )


def at_targets(values_BTX: Tensor, batch: Batch) -> Tensor:
    """The values at the places that have a target; all of them where nothing is padding."""
    flat_NX = values_BTX.flatten(0, 1)
    if len(flat_NX) == batch.num_targets:
        return flat_NX
    return Selected.apply(flat_NX, batch.places_N)


def at_last(values_BTX: Tensor, batch: Batch) -> Tensor:
    """The values at each row's last input: the one before its last id."""
    num_real_B = batch.num_inputs_B
    starts_B = torch.arange(len(num_real_B), device=num_real_B.device) * values_BTX.shape[1]
    return Selected.apply(values_BTX.flatten(0, 1), starts_B + num_real_B - 1)


def without_head(model: nn.Module) -> nn.Module:
    """The model up to its last hidden state; adapters stand inside it and stay."""
    whole: Any = model if isinstance(model, PreTrainedModel) else model.get_base_model()  # type: ignore[operator]
    return whole.base_model


class Selected(torch.autograd.Function):
    """Rows of a matrix, each at most once: the gradient is copied back, which torch's own
    indexing, made for repetitions, does more slowly."""

    @staticmethod
    def forward(context: Any, values_MX: Tensor, places_N: Tensor) -> Tensor:
        context.save_for_backward(places_N)
        context.num_rows = len(values_MX)
        return values_MX.index_select(0, places_N)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient_NX: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (places_N,) = context.saved_tensors
        whole_MX = gradient_NX.new_zeros(context.num_rows, gradient_NX.shape[1])
        return whole_MX.index_copy_(0, places_N, gradient_NX), None


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy behind a linear layer, without ever holding all logits.

    The gradient of the loss is known as soon as the logits are, so the forward pass computes
    it chunk by chunk and the backward pass only hands it on.
    """

    @staticmethod
    def forward(
        context: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        hidden_gradient = torch.empty_like(hidden_NH)
        weight_gradient = torch.zeros_like(weight_VH)
        bias_gradient = None if bias_V is None else torch.zeros_like(bias_V)
        share = 1 / max(1, len(targets_N))
        for start in range(0, len(targets_N), CHUNK["cpu"]):
            part = slice(start, start + CHUNK["cpu"])
            errors_NV, loss = softmax_errors(
                linear(hidden_NH[part], weight_VH, bias_V), targets_N[part]
            )
            errors_NV *= share
            total += loss
            torch.mm(errors_NV, weight_VH, out=hidden_gradient[part])
            weight_gradient.addmm_(errors_NV.t(), hidden_NH[part])
            if bias_gradient is not None:
                bias_gradient += errors_NV.sum(0)
        context.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        return (total * share).to(hidden_NH.dtype)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parts = context.saved_tensors
        return (*(None if part is None else part * gradient for part in parts), None)


def softmax_errors(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax minus the one-hot target, in place of the logits; and the summed loss."""
    targets_N1 = targets_N[:, None]
    log_sums_N1 = logits_NV.logsumexp(dim=1, keepdim=True)
    loss = (log_sums_N1 - logits_NV.gather(1, targets_N1)).double().sum()
    errors_NV = logits_NV.sub_(log_sums_N1).exp_()
    errors_NV.scatter_add_(1, targets_N1, -torch.ones_like(log_sums_N1))
    return errors_NV, loss


def validation_scores(forward: Forward, rows: Rows) -> Scores:
    """Scores over every target of `rows`, the model in evaluation mode meanwhile.

    Holds:
        naive: the same as scoring each row by itself.
        together: several processes share the batches out, and all have the figures of one.
    """
    model, processes = forward.model, Processes.here()
    was_training, own = model.training, []
    batches = like_lengths(rows, _positions_per_batch(forward))
    model.eval()
    try:
        for start in range(0, len(batches), processes.size):
            place = start + processes.rank
            # All run equally many, or split weights would not come together.
            chosen = batches[min(place, len(batches) - 1)]
            scores = forward.scores(gather(rows, chosen).to(model.device))
            own += [scores] if place < len(batches) else []
    finally:
        model.train(was_training)
    parts = [*chain.from_iterable(processes.all_gathered(own))]
    return Scores(
        loss_nats=math.fsum(part.loss_nats for part in parts),
        num_first=sum(part.num_first for part in parts),
        num_targets=sum(part.num_targets for part in parts),
    )


def losses_by_unit(forward: Forward, rows: Rows, unit_of_row: np.ndarray) -> np.ndarray:
    """The mean loss of each unit in nats a token, from passes of its own rows only.

    Holds:
        alone: nobody else's rows change a bit of it.
    """
    order = np.argsort(unit_of_row, kind="stable")
    ends = np.flatnonzero(np.diff(unit_of_row[order])) + 1
    scored = [validation_scores(forward, rows.only(own)) for own in np.split(order, ends)]
    return np.array([each.loss_nats / each.num_targets for each in scored])


def perplexities_to_beat(forward: Forward, rows: Rows, held_out: Rows) -> dict[str, float | None]:
    """What `held_out` is to the model as it is now, and to one who knows only how often each token
    stands in `rows`; every token counts once more, as unseen ones would be impossible."""
    now = validation_scores(forward, held_out)
    vocabulary = forward.model.config.get_text_config().vocab_size
    counts = np.bincount(rows.targets(), minlength=vocabulary) + 1
    nats = -np.log(counts / counts.sum())[held_out.targets()]
    return {
        "validation_perplexity_at_start": perplexity(now.loss_nats, now.num_targets),
        "validation_perplexity_by_frequency": perplexity(float(nats.sum()), len(nats)),
    }


def _positions_per_batch(forward: Forward) -> int:
    kind = "cuda" if forward.model.device.type == "cuda" else "cpu"
    if forward.reaches_inside:
        return POSITIONS[kind]
    vocabulary = forward.model.config.get_text_config().vocab_size
    return min(POSITIONS[kind], FOREIGN_LOGITS[kind] // vocabulary)


def like_lengths(rows: Rows, num_positions: int) -> list[np.ndarray]:
    """All rows, shortest first, in batches of about `num_positions` with padding."""
    order = np.argsort(rows.num_inputs, kind="stable")
    widths = rows.num_inputs[order]
    batches, start = [], 0
    while start < len(order):
        # Widths only grow, so a batch is as wide as its last row.
        candidates = widths[start : start + num_positions]
        sizes = candidates * np.arange(1, len(candidates) + 1)
        end = start + max(1, int(np.searchsorted(sizes, num_positions, side="right")))
        batches.append(order[start:end])
        start = end
    return batches


def perplexity(loss_nats: float, num_targets: int) -> float | None:
    """exp of the mean loss; None where there is none or it is too large for a number."""
    if not num_targets:
        return None
    mean = loss_nats / num_targets
    return math.exp(mean) if mean < 700 else None


def is_finite(model: torch.nn.Module) -> bool:
    """Whether every weight that is trained is a number."""
    trained: list[Any] = [each for each in model.parameters() if each.requires_grad]
    parts = [local(each) for each in trained]
    finite = bool(torch.stack([part.isfinite().all() for part in parts]).all())
    return all(Processes.here().all_gathered(finite))
