"""Ways to run one physical batch: as it is, captured in a CUDA graph, or compiled.

All give the same sums. A graph replays hundreds of small kernels without waiting for Python,
which is what an LSTM needs; the compiler fuses what a Transformer does between its products.
Both want fixed shapes: a shape is prepared when it is first seen.
Shapes: B rows, T positions.
"""

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random, SystemRandom
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tightlip.core.devices import deterministic, products_in
from tightlip.core.errors import UsageError
from tightlip.privacy.asking import Untouched
from tightlip.privacy.clipping import (
    Clip,
    ClippedGradients,
    clipped_sum,
    unit_by_unit,
    watched_pass,
)
from tightlip.privacy.experts import experts_in, rows_apart
from tightlip.privacy.layers import Layout, Use, Whole, wide
from tightlip.privacy.rounding import Scaled
from tightlip.privacy.row_losses import NO_LABEL, token_weights
from tightlip.privacy.shards import check_has_rules, whole_parameters
from tightlip.privacy.watching import NoRule, Watch

log = logging.getLogger("tightlip")
Way = Literal["eager", "graph", "compile", "mapped", "slow"]


@dataclass(frozen=True, eq=False)
class Physical:
    """Rows side by side, unit after unit, padded on the right; a target stands at the position
    that predicts it. Rows beyond a unit's own have no target.

    `shares_U` is which share of the clip norm bounds each unit; all of it where none is given.
    Language models look left only, so that a mask is needed only where rows are padded on the left.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    layout: Layout
    shares_U: Tensor | None = None
    mask_BT: Tensor | None = None

    @classmethod
    def of(
        cls,
        ids_BT: Tensor,
        targets_BT: Tensor,
        num_rows_U: Tensor,
        layout: Layout,
        shares_U: Tensor | None = None,
        mask_BT: Tensor | None = None,
    ) -> "Physical":
        """`num_rows_U` is how many of each unit's rows are its own."""
        weights_BT = token_weights(targets_BT, layout.to_rows(num_rows_U.clamp(min=1)))
        return cls(ids_BT, targets_BT, weights_BT, layout, shares_U, mask_BT)

    def without(self, gone_U: Tensor) -> "Physical":
        """The same places, some units' empty: as though they had not been drawn."""
        gone_B1 = self.layout.to_rows(gone_U)[:, None]
        return replace(
            self,
            ids_BT=torch.where(gone_B1, 0, self.ids_BT),
            targets_BT=torch.where(gone_B1, NO_LABEL, self.targets_BT),
            weights_BT=torch.where(gone_B1, 0, self.weights_BT),
        )

    def moved_up(self) -> "Physical":
        """Every unit one place further, the last one in the first."""
        by = self.layout.rows_per_unit
        return replace(
            self,
            ids_BT=self.ids_BT.roll(by, 0),
            targets_BT=self.targets_BT.roll(by, 0),
            weights_BT=self.weights_BT.roll(by, 0),
            shares_U=None if self.shares_U is None else self.shares_U.roll(1, 0),
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a prepared pass is fed: always as many tensors, so that none keeps an old share."""
        if (shares_U := self.shares_U) is None:
            kind, where = self.weights_BT.dtype, self.ids_BT.device
            shares_U = torch.ones(self.layout.num_units, dtype=kind, device=where)
        return self.ids_BT, self.targets_BT, self.weights_BT, shares_U


class Passes:
    """The clipped (or, with no `clip`, the plain) sum of gradients of a physical batch.

    The result may live in memory that the next call overwrites. With a unit that is not finite the
    sum of a captured or compiled pass may be no number: its norm tells, and `Physical.without` it.
    """

    def __init__(
        self, model: nn.Module, clip: Clip | None, *, way: Way = "eager", bf16: bool = False
    ) -> None:
        self.model, self.clip, self.way, self.bf16 = model, clip, way, bf16
        # Wiping would copy every layer's numbers at each replay, for what hardly ever happens.
        self._prepared = None if clip is None else replace(clip, wipes=False)
        self.parameters, self._experts = whole_parameters(model), experts_in(model)
        # How weights are moved while something is asked of them.
        self.draws: Random = SystemRandom()
        self._ready: dict[Any, Callable[[Physical], ClippedGradients]] = {}
        self._pool: Any = None
        self.untouched = Untouched(model)

    def __call__(self, batch: Physical) -> ClippedGradients:
        # A prepared pass does what it did when it was prepared.
        if self.way in ("graph", "compile") and self._key(batch) in self._ready:
            return self._fast(batch)
        with nullcontext() if self.clip is None else self.untouched():
            return self._directly(batch)

    def _directly(self, batch: Physical) -> ClippedGradients:
        if self.way == "slow":
            return self.slow(batch)
        try:
            return self._fast(batch)
        except NoRule as error:  # or shapes of this batch that leave it open whose row is whose
            if self.clip is None:
                raise UsageError(
                    f"No rule covers {error}. Train it without CUDA graphs."
                ) from error
            check_has_rules(self.model, str(error))
            warn_slow(str(error))
            return self.slow(batch)

    def _fast(self, batch: Physical) -> ClippedGradients:
        if self.way == "eager":
            return self.eager(batch)
        if self.way == "mapped":
            try:
                return self.mapped(batch)
            except RuntimeError as error:  # a width that vmap cannot run, whose units stand alone
                raise NoRule("the model", f"mapped, it fails: {error}") from error
        assert batch.mask_BT is None, "a prepared pass is fed no mask"
        key = self._key(batch)
        if key not in self._ready:
            ready = self._captured if self.way == "graph" else self._compiled
            try:
                self._ready[key] = ready(batch)
            except WaitsForGPU as error:
                log.warning("Passes of this model cannot be captured in a CUDA graph, and are launched kernel by kernel, which is slower: %s.", error)  # fmt: skip
                self.way = "eager"
                return self.eager(batch)
        return self._ready[key](batch)

    def _key(self, batch: Physical) -> Any:
        return batch.ids_BT.shape, batch.layout

    def eager(self, batch: Physical) -> ClippedGradients:
        """One pass as it is; NoRule where a parameter is used in a way that no rule covers."""
        return self._in_one_pass(batch.layout, *batch.tensors, mask_BT=batch.mask_BT)

    def _in_one_pass(
        self,
        layout: Layout,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        shares_U: Tensor,
        *,
        mask_BT: Tensor | None = None,
        look: bool = True,
        clip: Clip | None = None,
    ) -> ClippedGradients:
        watch, losses_B = self.watched(ids_BT, targets_BT, weights_BT, mask_BT=mask_BT, look=look)
        return summed(watch, self.parameters, losses_B, layout, clip or self.clip, shares_U)

    def watched(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        *,
        mask_BT: Tensor | None = None,
        look: bool = True,
    ) -> tuple[Watch, Tensor]:
        """One pass as it is, nothing summed up yet: every use of every parameter, and each row's loss."""
        with self._precision(), rows_apart(self._experts):
            return watched_pass(
                self.parameters,
                lambda: logits_of(self.model, ids_BT, mask_BT),
                targets_BT,
                weights_BT,
                look_for_unseen=look,
            )

    def mapped(self, batch: Physical) -> ClippedGradients:
        """All rows at once by torch's `vmap`, every row's gradient written out: no rule is needed, and
        memory for as many gradients as there are rows."""
        assert batch.mask_BT is None, "rows that are mapped have no mask"

        def loss(
            own: dict[str, Tensor], ids_T: Tensor, targets_T: Tensor, weights_T: Tensor
        ) -> Any:
            logits_TV = _swapped_logits(self.model, own, ids_T[None])[0]
            losses_T = cross_entropy(
                logits_TV.to(wide(logits_TV)), targets_T, ignore_index=NO_LABEL, reduction="none"
            )
            return (losses_T * weights_T).sum()

        own = {name: each.detach() for name, each in self.parameters.items()}
        each_row = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0, 0))
        with self._precision():
            gradients, losses_B = each_row(own, *batch.tensors[:3])
        watch = Watch(self.parameters, batch.layout.num_rows, batch.ids_BT.shape[1])
        watch.uses = {name: [Whole(each_BX)] for name, each_BX in gradients.items()}
        return summed(watch, self.parameters, losses_B, batch.layout, self.clip, batch.tensors[3])

    def slow(self, batch: Physical, *, beside: bool = False) -> ClippedGradients:
        """Unit after unit by plain autograd; with `beside` among the others, whose losses are zero."""
        assert self.clip is not None
        mask_BT = batch.mask_BT
        with self._precision():
            return unit_by_unit(
                self.parameters,
                lambda rows: logits_of(
                    self.model, batch.ids_BT[rows], None if mask_BT is None else mask_BT[rows]
                ),
                batch.targets_BT,
                batch.weights_BT,
                batch.layout,
                self.clip,
                batch.tensors[3],
                beside=beside,
            )

    def _captured(self, batch: Physical) -> Callable[[Physical], ClippedGradients]:
        def run(*tensors: Tensor, look: bool = False) -> ClippedGradients:
            return self._in_one_pass(batch.layout, *tensors, look=look, clip=self._prepared)

        usual = run(*batch.tensors, look=True)  # kernels are built and chosen, which may wait
        with never_packed():
            # Asked before: a capture that fails leaves torch's memory in disorder.
            with _no_waiting():
                unpacked = run(*batch.tensors)
            if not torch.allclose(usual.losses, unpacked.losses, rtol=1e-3, equal_nan=True):
                raise WaitsForGPU("it takes several texts in a row apart by their positions")
            replay, self._pool = captured(
                run, batch.tensors, warm_up=partial(run, look=True), pool=self._pool
            )
        return lambda given: replay(given.tensors)

    def _compiled(self, batch: Physical) -> Callable[[Physical], ClippedGradients]:
        """One graph of everything, forward, back, norms and sums, made by running it once on
        stand-ins; so nothing can depend on what this batch happens to hold."""
        from torch.fx.experimental.proxy_tensor import make_fx

        names = list(self.parameters)
        # Whatever else the model holds goes in too, or the trace would keep its values of today.
        frozen = {
            name: each.detach()
            for name, each in self.model.named_parameters()
            if name not in self.parameters
        }
        others = {**frozen, **dict(self.model.named_buffers())}

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            weights, kept = given[: len(names)], given[len(names) : -len(batch.tensors)]
            ids, targets, of_loss, of_clip = given[-len(batch.tensors) :]
            own = {
                name: each.detach().requires_grad_()
                for name, each in zip(names, weights, strict=True)
            }
            swapped = {**own, **dict(zip(others, kept, strict=True))}
            with self._precision(), rows_apart(self._experts):
                watch, losses_B = watched_pass(
                    own,  # type: ignore[arg-type]
                    lambda: _swapped_logits(self.model, swapped, ids),
                    targets,
                    of_loss,
                    look_for_unseen=True,
                )
            result = summed(watch, own, losses_B, batch.layout, self._prepared, of_clip)  # type: ignore[arg-type]
            return (*(result.gradients[name] for name in names), result.norms, result.losses)

        held = [*(each.detach() for each in self.parameters.values()), *others.values()]
        # A traced graph keeps no change of precision half-way, and norms may not be in tf32.
        precise = nullcontext if self.clip is None else products_in
        with precise():
            traced = make_fx(run, tracing_mode="fake")(*held, *batch.tensors)
            if self._device.type == "cuda":
                # Straight to the compiler: torch.compile would read all of a graph again that is
                # traced already, which took it longer than the rest.
                compiled = torch._inductor.compile(traced, [*held, *batch.tensors])
            else:  # where it keeps what it compiled before
                compiled = torch.compile(traced, dynamic=False)

        def call(*tensors: Tensor) -> ClippedGradients:
            with torch.no_grad(), precise(), self._one_order():
                *gradients, norms, losses = compiled(*held, *tensors)
            return ClippedGradients(dict(zip(names, gradients, strict=True)), norms, losses)

        if batch.ids_BT.device.type != "cuda":
            return lambda given: call(*given.tensors)
        # Its hundreds of kernels take Python longer to launch than a GPU to run.
        replay, self._pool = captured(call, batch.tensors, warm_up=call, pool=self._pool)
        return lambda given: replay(given.tensors)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        # Whatever autocast is on around the call: rows were asked in this precision. Autocast's
        # cache would hand one trace's copies of weights to the next.
        how = {"dtype": torch.bfloat16, "enabled": self.bf16, "cache_enabled": False}
        with self._one_order(), torch.autocast(self._device.type, **how):
            yield

    def _one_order(self) -> AbstractContextManager:
        return nullcontext() if self.clip is None else deterministic(self._device.type)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


def logits_of(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The logits of any language model: its `.logits`, its first output, or its output."""
    own = getattr(model, "_orig_mod", model)  # what torch.compile wraps takes anything
    known = inspect.signature(own.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    options: dict[str, Any] = {}
    if attention_mask is not None and not takes_any and "attention_mask" not in known:
        raise UsageError(f"{type(model).__name__} takes no attention_mask. Leave it out.")
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    if "use_cache" in known or takes_any:
        options["use_cache"] = False
    outputs = model(input_ids, **options)
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    logits = outputs[0] if logits is None else logits
    if logits.ndim != 3 or logits.shape[:2] != input_ids.shape:
        raise UsageError(
            f"{type(model).__name__} gives logits of shape {tuple(logits.shape)} for ids of shape "
            f"{tuple(input_ids.shape)}. It must give one row of numbers per id."
        )
    return logits


def warn_slow(reason: str) -> None:
    warnings.warn(
        f"No fast rule covers {reason}. Units are clipped one after the other instead: exact, but slow.",
        stacklevel=3,
    )


@contextmanager
def never_packed() -> Iterator[None]:
    """transformers asks by their positions whether rows hold several texts, and Python waits for the
    GPU's answer, so that none of its models could be captured. Ours hold one, counted by the model."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if (asked := getattr(masks, "find_packed_sequence_indices", None)) is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = asked


class WaitsForGPU(Exception):
    """A pass in which Python waits for a number from the GPU, as some mixtures of experts do."""


@contextmanager
def _no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise WaitsForGPU(str(error).splitlines()[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(
    run: Callable[..., Any], tensors: tuple[Tensor, ...], *, warm_up: Callable[..., Any], pool: Any
) -> tuple[Callable[[tuple[Tensor, ...]], Any], Any]:
    """`run` as a CUDA graph: a call that fills in other tensors and replays it, and its memory
    pool, for the next graph to share. Results are overwritten by the next call."""
    own = tuple(tensor.clone() for tensor in tensors)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):  # kernels are chosen and built the first time
            warm_up(*own)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run(*own)

    def replay(given: tuple[Tensor, ...]) -> Any:
        for there, tensor in zip(own, given, strict=True):
            there.copy_(tensor, non_blocking=True)
        graph.replay()
        return result

    return replay, pool or graph.pool()


def plain_sums(
    uses: dict[str, list[Use]], parameters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Every parameter's gradient from its uses, nobody's share scaled."""
    ones = Scaled(None, wipe=False, finite=())
    return {
        name: ones.sum(own, parameters[name]) if own else torch.zeros_like(parameters[name])
        for name, own in uses.items()
    }


def summed(
    watch: Watch,
    parameters: dict[str, nn.Parameter],
    losses_B: Tensor,
    layout: Layout,
    clip: Clip | None,
    shares_U: Tensor,
) -> ClippedGradients:
    """The clipped sum over units, or without a clip the plain one."""
    try:
        # The caller's autocast would round norms and sums to bfloat16.
        with torch.no_grad(), torch.autocast(losses_B.device.type, enabled=False):
            apart = watch.apart(parameters)
            if clip is not None:
                found = clipped_sum(watch, apart, losses_B, layout, clip, shares_U)
            else:
                losses_U = layout.sum_by_unit(losses_B)
                gradients = plain_sums(watch.uses, apart)
                found = ClippedGradients(gradients, torch.zeros_like(losses_U), losses_U)
            return replace(found, gradients=watch.together(found.gradients, parameters))
    finally:
        watch.forget()


def _swapped_logits(model: nn.Module, swapped: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
    class _Model(nn.Module):
        """So that `functional_call` may be asked for the logits rather than for all outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            return logits_of(self.inner, ids, None)

    named = {f"inner.{name}": tensor for name, tensor in swapped.items()}
    return torch.func.functional_call(_Model(), named, (ids_BT,), tie_weights=True)
