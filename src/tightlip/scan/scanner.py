"""One teacher-forced pass over every document: what a scorer says of each token.

Rows of like length share a batch. The output layer is applied to a few hundred positions at a
time and its logits are reduced at once, so no batch of full logits is ever kept.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tightlip.core.devices import device_of, full_precision, looks_ahead, moved, rounding_tolerance
from tightlip.core.errors import UsageError
from tightlip.core.progress import log
from tightlip.models.checks import rounding_of
from tightlip.scan.store import PLAIN, Scorer

DEFAULT_WINDOW = 2048  # for models that name no limit and carry no state of ours
RECURRENT_CHUNK = 1024
LOGIT_ROWS = {"cpu": 256, "cuda": 4096}
BATCH_TOKENS = {"cpu": 16_384, "cuda": 65_536}


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Rows to feed: inputs [start, end) of a document's input row, targets kept from `keep` on.

    Input j of a document is its BOS (j = 0, where there is one) or a token; input j predicts
    what stands at j + 1.
    """

    documents: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    keeps: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Filling:
    """A scan under way: what is read, and the scorer's columns that fill up."""

    tokens: np.ndarray
    bounds: np.ndarray
    cover: Segments
    scorer: Scorer
    columns: list[np.ndarray]
    under_way: "deque[Scored]" = field(default_factory=deque)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What was said of some places, on its way from the device; and whether some of it is NaN."""

    places: np.ndarray
    columns: list[torch.Tensor]
    is_nan: torch.Tensor
    arrived: Any  # an event of the GPU, None where nothing travels


def segments_of(lengths: np.ndarray, has_bos: bool, window: int | None) -> Segments:
    """Cover each document's targets once, each with half a window of context or all there is.

    >>> cover = segments_of(np.array([9]), has_bos=True, window=4)
    >>> list(zip(cover.starts.tolist(), cover.ends.tolist(), cover.keeps.tolist()))
    [(0, 4, 1), (3, 7, 5), (6, 9, 8)]
    """
    last_targets = lengths - 1 + int(has_bos)
    limit = window or int(last_targets.max(initial=1))
    half = (limit + 1) // 2
    # Most documents fit one window. A loop over them all left the GPU waiting.
    whole = np.flatnonzero((last_targets > 0) & (last_targets <= limit))
    starts, keeps = np.zeros_like(whole), np.ones_like(whole)
    rows: list[tuple[int, int, int, int]] = []
    for document in np.flatnonzero(last_targets > limit):
        last, end = int(last_targets[document]), 0
        while end < last:
            keep = end + 1
            start = max(0, keep - half)
            end = min(start + limit, last)
            rows.append((int(document), start, end, keep))
    short = np.stack([whole, starts, last_targets[whole], keeps], axis=1)
    table = np.concatenate([short, np.array(rows, dtype=np.int64).reshape(-1, 4)])
    table = table[np.argsort(table[:, 0], kind="stable")]
    return Segments(documents=table[:, 0], starts=table[:, 1], ends=table[:, 2], keeps=table[:, 3])


class Scanner:
    """A model ready to score documents given as token ids."""

    def __init__(
        self,
        model: Any,
        *,
        bos_id: int | None,
        window: int | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.device = device_of(model)
        self.bos_id = bos_id
        config = getattr(model, "config", None)
        self.carries_state = bool(getattr(config, "is_recurrent", False))
        self.window = None if self.carries_state else checked_window(window, config)
        kind = self.device.type
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(kind, 16_384)
        self.logit_rows = LOGIT_ROWS.get(kind, 1024)
        self.halves = True  # a batch that does not fit; other batches round otherwise
        self.output_layer: Any = None
        self._checked = False
        self._refuse_broken_weights()

    def _refuse_broken_weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            # Neither whole numbers, nor what is on disk, nor what is made of several tensors.
            is_read = parameter.dtype.is_floating_point and parameter.device.type != "meta"
            is_plain = is_read and not hasattr(parameter, "__tensor_flatten__")
            if is_plain and not torch.isfinite(parameter).all():
                raise UsageError(
                    f"Parameter {name} holds NaN or infinite values, so every prediction would be "
                    f"meaningless. Audit an earlier snapshot, or train again with a lower rate."
                )

    def scan(
        self, tokens: np.ndarray, bounds: np.ndarray, scorer: Scorer = PLAIN
    ) -> tuple[np.ndarray, ...]:
        """The scorer's columns of tokens[bounds[0]:bounds[-1]], rank and log-probability unless
        another is given; NOT_SCORED and NaN where nothing is predicted."""
        return tuple(self.begun(tokens, bounds, scorer))

    def begun(
        self, tokens: np.ndarray, bounds: np.ndarray, scorer: Scorer = PLAIN
    ) -> Iterator[np.ndarray]:
        """The same columns, for which the device may still be at work until they are asked for: whoever
        has more to scan begins that first, and the device never waits."""
        cover = segments_of(np.diff(bounds), self.bos_id is not None, self.window)
        into = Filling(
            tokens=tokens,
            bounds=bounds,
            cover=cover,
            scorer=scorer,
            columns=scorer.empty(int(bounds[-1] - bounds[0])),
        )
        with torch.inference_mode(), full_precision(), evaluating(self.model):
            for rows in self._batches(cover):
                self._score_or_halve(into, rows)
        return self._finished(into)

    def _finished(self, into: Filling) -> Iterator[np.ndarray]:
        self._read_back(into, but=0)
        yield from into.columns

    def _batches(self, cover: Segments) -> Iterator[np.ndarray]:
        """Rows of like length, longest first, so that a batch too large for memory shows early."""
        sizes = cover.ends - cover.starts
        waiting = np.argsort(-sizes, kind="stable")
        while len(waiting):
            rows = max(1, self.batch_tokens // int(sizes[waiting[0]]))
            yield waiting[:rows]
            waiting = waiting[rows:]

    def _score_or_halve(self, into: Filling, rows: np.ndarray) -> None:
        """Score a batch; out of memory, halve it and go on with smaller ones."""
        try:
            self._score_batch(into, rows)
            return
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            if len(rows) == 1:
                size = int((into.cover.ends - into.cover.starts)[rows[0]])
                raise UsageError(
                    f"One row of {size} tokens does not fit the memory of {self.device}. "
                    f"Give a smaller --window or another --device."
                ) from error
            if not self.halves:
                raise UsageError(
                    f"A batch of {self.batch_tokens:,} tokens does not fit the memory of {self.device}, and smaller ones on some "
                    "machines would round otherwise than the rest. Give a smaller --batch-tokens."
                ) from error
        # Outside the handler, so that the failed batch's tensors are released.
        self.batch_tokens = max(1, self.batch_tokens // 2)
        log.warning("Out of memory: going on with batches of %d tokens.", self.batch_tokens)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(rows) // 2
        self._score_or_halve(into, rows[:half])
        self._score_or_halve(into, rows[half:])

    def _score_batch(self, into: Filling, rows: np.ndarray) -> None:
        """Score the rows in stretches of time. A recurrent state carries over from one to the
        next, so that a document of any length takes the memory of one stretch."""
        width = int((into.cover.ends - into.cover.starts)[rows].max())
        stretch = RECURRENT_CHUNK if self.carries_state else width
        state = None
        for begin in range(0, width, stretch):
            inputs_BT, places_BT, wanted_BT = self._padded(
                into, rows, begin, min(begin + stretch, width)
            )
            if not self._checked:
                self._check(inputs_BT)
            inputs = moved(torch.from_numpy(inputs_BT), self.device)
            hidden, state = self._forward(inputs, state=state, keep_state=stretch < width)
            places = places_BT[wanted_BT]
            # Indices rather than a mask: the GPU need not stop to count them.
            chosen = moved(torch.from_numpy(np.flatnonzero(wanted_BT)), self.device)
            targets = moved(torch.from_numpy(into.tokens[places].astype(np.int64)), self.device)
            kept = hidden.flatten(0, 1).index_select(0, chosen)
            scored = self._score_rows(kept, targets, into.scorer, places - into.bounds[0])
            into.under_way.append(scored)
            self._read_back(into, but=1)

    def _read_back(self, into: Filling, *, but: int) -> None:
        """Put what arrived into its columns; the last ones stay under way while the next are scored."""
        while len(into.under_way) > but:
            scored = into.under_way.popleft()
            if scored.arrived is not None:
                scored.arrived.synchronize()
            if scored.is_nan:
                raise _says_nan()
            for column, values in zip(into.columns, scored.columns, strict=True):
                column[scored.places] = values.numpy()

    def _padded(
        self, into: Filling, rows: np.ndarray, begin: int, end: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Columns [begin, end) of the rows: inputs, the place in the corpus each predicts, and
        whether that prediction is kept. Padding is on the right, where a causal model never
        looks, so no mask is needed."""
        cover, has_bos = into.cover, int(self.bos_id is not None)
        starts, ends, keeps = cover.starts[rows], cover.ends[rows], cover.keeps[rows]
        input_index = starts[:, None] + np.arange(begin, end)
        valid = input_index < ends[:, None]
        source = (into.bounds[cover.documents[rows]] - has_bos)[:, None] + input_index
        inputs = np.zeros(valid.shape, dtype=np.int64)
        is_token = valid & (input_index >= has_bos)
        inputs[is_token] = into.tokens[source[is_token]]
        if self.bos_id is not None:
            inputs[valid & (input_index == 0)] = self.bos_id
        return inputs, source + 1, valid & (input_index + 1 >= keeps[:, None])

    def _forward(
        self, inputs: torch.Tensor, *, state: Any = None, keep_state: bool = False
    ) -> tuple[torch.Tensor, Any]:
        body = self.model if self.output_layer is None else self.model.base_model
        extra: dict[str, Any] = {"past_key_values": state} if self.carries_state else {}
        if hasattr(self.model, "config"):
            extra["use_cache"] = keep_state
        try:
            output = body(input_ids=inputs, **extra)
        except IndexError as error:
            raise UsageError(
                f"The model failed on a row of {inputs.shape[1]} tokens ({error}). Its window may be "
                f"shorter than its config says, or the tokenizer has ids the model lacks. "
                f"Give --window with a smaller number, or the tokenizer the model was trained with."
            ) from error
        values = output.logits if self.output_layer is None else output.last_hidden_state
        return values, getattr(output, "past_key_values", None)

    def _score_rows(
        self, rows: torch.Tensor, targets: torch.Tensor, scorer: Scorer, places: np.ndarray
    ) -> Scored:
        columns = [
            torch.empty(len(rows), dtype=torch.from_numpy(one).dtype, device=self.device)
            for one in scorer.empty(0)
        ]
        for begin in range(0, len(rows), self.logit_rows):
            part = slice(begin, begin + self.logit_rows)
            logits = rows[part] if self.output_layer is None else self.output_layer(rows[part])
            for column, values in zip(columns, scorer.score(logits, targets[part]), strict=True):
                column[part] = values
        # The CPU kernel assumes that no logit is NaN, so what the logits come from is looked at.
        is_nan = torch.stack([torch.isnan(one).any() for one in (rows, *columns)]).any()
        travels = self.device.type == "cuda"
        *columns, is_nan = (one.to("cpu", non_blocking=travels) for one in (*columns, is_nan))
        arrived = torch.cuda.current_stream(self.device).record_event() if travels else None
        return Scored(places=places, columns=columns, is_nan=is_nan, arrived=arrived)

    def check_on(self, tokens: np.ndarray, bounds: np.ndarray) -> None:
        """Look at the model on the longest document's beginning, so that whichever shard comes first
        has no part in how the others are read."""
        longest = int(np.diff(bounds).argmax()) if len(bounds) > 1 else 0
        row = tokens[bounds[longest] : bounds[longest] + 127] if len(bounds) > 1 else tokens
        ids = [*([] if self.bos_id is None else [self.bos_id]), *row.tolist()]
        if ids:
            with torch.inference_mode(), full_precision(), evaluating(self.model):
                self.output_layer = None
                self._check(np.array([ids[: self.window]]))

    def _check(self, inputs_BT: np.ndarray) -> None:
        """Once, on one row: is the model causal, and do its hidden states give its own logits?"""
        row = torch.from_numpy(inputs_BT[:1, :128]).to(self.device)
        logits = self._first_logits(row)
        if torch.isnan(logits).any():  # which differs from itself, and would read as looking ahead
            raise _says_nan()
        self._refuse_looking_ahead(row)
        self.output_layer = self._usable_output_layer(row, logits)
        self._checked = True

    def _first_logits(self, row: torch.Tensor) -> torch.Tensor:
        try:
            return self._forward(row)[0].float()
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model's own code raises
            if _is_out_of_memory(error):
                raise
            raise UsageError(
                f"The model fails on its first row ({type(error).__name__}: {str(error)[:200]}). Its configuration may not be "
                "that of its weights: save both together with save_pretrained."
            ) from error

    def _refuse_looking_ahead(self, row: torch.Tensor) -> None:
        tolerance = rounding_tolerance(self._dtype(), least=rounding_of(self.model))
        if looks_ahead(lambda ids: self._forward(ids)[0].float(), row, tolerance=tolerance):
            raise UsageError(
                "The model's predictions change with the words that come after them, so it is no "
                "causal language model and every hit would be a false one. Audit the causal model; "
                "for a BERT shape that means config.is_decoder = true in training and here."
            )

    def _usable_output_layer(self, row: torch.Tensor, logits: torch.Tensor) -> Any:
        find = getattr(self.model, "get_output_embeddings", None)
        layer = find() if find else None
        body = getattr(self.model, "base_model", self.model)
        if layer is None or body is self.model:
            return None
        hidden = getattr(body(input_ids=row), "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != getattr(layer, "in_features", -1):
            return None
        if self._close(layer(hidden).float(), logits):
            return layer
        log.info("The model changes its output layer's logits; using the model's own, in full.")
        return None

    def _dtype(self) -> torch.dtype:
        """What the model computes in; quantised weights are whole numbers and do not tell."""
        kinds = (p.dtype for p in self.model.parameters() if p.dtype.is_floating_point)
        return next(kinds, torch.float32)

    def _close(self, values: torch.Tensor, reference: torch.Tensor) -> bool:
        """Equal up to the rounding of the type the model computes in."""
        tolerance = 1e-4 if self._dtype() in (torch.float32, torch.float64) else 2e-2
        tolerance = max(tolerance, rounding_of(self.model))
        finite = torch.isfinite(reference)
        spread = float(reference[finite].abs().max()) if finite.any() else 1.0
        near = torch.isclose(values, reference, rtol=0, atol=tolerance * max(spread, 1e-6))
        return bool((near | (values == reference)).all())


def checked_window(window: int | None, config: Any) -> int:
    """The window asked for, if the model has as many positions; its own where none was."""
    own = window_of(config)
    if window is not None and window > own and own != DEFAULT_WINDOW:
        raise UsageError(
            f"window={window} is more than the {own} positions the model has. Use {own} or fewer."
        )
    return window or own


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode inside; afterwards every part is as it was, dropout included."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def window_of(config: Any) -> int:
    """The most tokens the model may be shown at once."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            if getattr(config, "model_type", "") in {"roberta", "xlm-roberta", "camembert"}:
                return value - int(getattr(config, "pad_token_id", None) or 1) - 1
            return value
    return DEFAULT_WINDOW


def _says_nan() -> UsageError:
    # A NaN is above nothing and below nothing: left alone, it would pass for a correct guess.
    return UsageError(
        "The model's predictions are NaN on this corpus, so nothing can be said about it. "
        "Try --dtype float32; if that is what was used, the model is broken."
    )


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
