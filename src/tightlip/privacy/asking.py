"""Whether rows of a pass can meet, whatever they hold; and whether a model changes itself.

`if (ids == 7).any()` is one branch for a whole batch, so that one person's words would decide on
everybody's; `hidden.amax()` is one number for it. Synthetic rows need not hold the words, so what is
looked for is the operation. It shows in shapes: the number of rows is a prime that divides no other
size, so what hangs on rows has it as a factor once, and what has lost it was made of several rows.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tightlip.core.errors import GuaranteeError
from tightlip.privacy.derived import every_tensor
from tightlip.privacy.shards import local, shards_of
from tightlip.privacy.watching import Watch

# Questions that a tensor answers past torch's operations; all others lose the rows on their way.
_ASKING = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.storage),
    *(Tensor.__repr__, Tensor.__format__, Tensor.__deepcopy__, Tensor.__reduce_ex__),
}
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
# A size, as of a part of a row, may be a multiple of one by chance: not in the same way of both.
PRIMES_TRIED = 2
# transformers looks for padding there, to say that a mask is missing, and does nothing else with it.
_ONLY_WARNS = "warn_if_padding_and_no_attention_mask"
_MODES = ("__torch_function__", "__torch_dispatch__")
_TORCH, _RULES = (os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
# Whose frames are the model's, though it may have none of its own: see `passes.logits_of`.
_RUNS_MODEL = "logits_of"
_OF_DIMS = ("dim", "dims", "dimension")
# What has a `dim` and yet lets no row meet another: it is only named, or moved as a whole.
_MOVES_DIMS = {
    *("stack", "squeeze", "unsqueeze", "transpose", "permute", "select_backward", "slice_backward"),
}
# What goes number by number without torch's saying so, or row by row.
_BY_NUMBER = {
    *("_to_copy", "_unsafe_view", "_reshape_alias", "expand_copy", "view_copy", "copy_", "lift_fresh"),
    *("fill", "fill_", "zero", "zero_", "masked_fill_", "tril", "tril_", "triu", "triu_", "complex"),
    *("polar", "hardswish", "log_sigmoid_forward", "native_dropout", "embedding_dense_backward"),
    *("elu_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward"),
    *("leaky_relu_backward", "log_sigmoid_backward", "mish_backward", "softplus_backward"),
    *("softshrink_backward", "hardshrink_backward"),
}  # fmt: skip
_IN_ANY_ORDER = {"take", "put", "put_", "masked_scatter", "masked_scatter_", "as_strided", "renorm"}
# Pools and what makes a picture larger, by the number of dimensions that they go along.
_SPATIAL = re.compile(r"(?:pool|upsample_\w+)(\d)d")
_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "view_copy"}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# bitsandbytes' products, and what rounds each row by itself where it has no threshold.
_FEW_BITS = ("gemm_4bit", "int8_vectorwise_quant", "int8_scaled_mm", "int8_linear_matmul", "int8_mm_dequant")  # fmt: skip
# Products, by which of their arguments stands on the left: its last dimension is summed over.
_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "_int_mm", "_scaled_mm", "_grouped_mm"), 0),
    **dict.fromkeys((f"_weight_int{kind}" for kind in ("8pack_mm", "4pack_mm", "4pack_mm_for_cpu")), 0),
    **dict.fromkeys(_FEW_BITS, 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"), 1),
}  # fmt: skip


def how_rows_meet(
    run: Callable[[int, Callable[[Tensor], None]], Any], sizes: set[int], *, usual: int
) -> str | None:
    """The operation by which one row may change another, in words; None where there is none.

    `run` takes a number of rows and what it has to show them to, and runs a pass of so many, forward
    and back; `sizes` are all others that it meets. Real passes have the `usual` number.

    Holds:
        whatever they hold: the answer follows from shapes, and from no number in them.

    Not every way to meet can be seen in shapes: of rows that are one dimension with something else and
    are cut otherwise, it cannot. `rows_alone` looks at numbers as well.
    """

    def followed(num_rows: int) -> _Meeting:
        meeting = _Meeting(num_rows)
        with _Asking(meeting), meeting:
            run(num_rows, meeting.follow)
        return meeting

    primes = [prime for prime in _PRIMES if all(size % prime for size in sizes if size)]
    if len(primes) < PRIMES_TRIED:
        return "its sizes leave no number of rows that could be told from them"
    one = followed(primes[0])
    # A model may take rows by fours, or few of them in another way.
    if one.done_with(usual) != followed(usual).done:
        return "the model does other things with other numbers of rows"
    if not one.found:
        return None
    other = followed(primes[1])
    both = [how for how in one.found if how in other.found]
    return f"the model {both[0]}" if both else None


class _Asking(TorchFunctionMode):
    """Tells of questions asked of rows that torch's operations do not show."""

    def __init__(self, meeting: "_Meeting") -> None:
        super().__init__()
        self._meeting = meeting

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKING and any(map(self._meeting.has_rows, every_tensor(args, kwargs))):
            self._meeting.note(f"asks what its rows hold ({func.__name__})")
        return func(*args, **kwargs)


class _Meeting(TorchDispatchMode):
    """Notes the operations in which rows may meet: below autograd, scripts and hooks, so that the way
    back is seen as well. What is made of the rows is known by its memory."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.found: list[str] = []
        # The model's operations on rows, in their order, and the shapes that they make.
        self.done: list[tuple[str, list[tuple[int, ...]]]] = []
        self._num_rows = num_rows
        # By what they are, not by where: memory of rows that are gone is soon somebody else's, as
        # weights' that are gathered from shards. While it is referred to, none other is the same.
        self._of_rows: dict[int, StorageWeakRef] = {}

    def follow(self, tensor: Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        self._of_rows.setdefault(storage.cdata, storage)

    def has_rows(self, tensor: Tensor) -> bool:
        return self._hangs(tensor) and _factors(tensor.shape, self._num_rows) > 0

    def done_with(self, num_rows: int) -> list[tuple[str, list[tuple[int, ...]]]]:
        """What would be done with another number of rows, if that were all that is different."""
        own = self._num_rows

        def other(size: int) -> int:
            return size if size % own else size // own * num_rows

        return [(name, [tuple(map(other, each)) for each in shapes]) for name, shapes in self.done]

    def note(self, how: str | None) -> None:
        if how is not None and not _is_harmless(how):
            self.found.append(how)

    def _hangs(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage()._cdata in self._of_rows

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in every_tensor(args, kwargs) if self._hangs(each)]
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__ if isinstance(func, OpOverload) else str(func)
        only_shape = name.startswith("new_") or name.endswith("_like")
        for each in every_tensor((result,), {}):
            if given and not only_shape:
                self.follow(each)
            else:  # where something of the rows was, and is gone
                self._of_rows.pop(each.untyped_storage()._cdata, None)
        if given and not only_shape and not _is_harmless(name):
            self.done.append((name, [tuple(each.shape) for each in every_tensor((result,), {})]))
        if any(map(self.has_rows, given)) and not only_shape:
            self.note(self._how(func, args, kwargs, result))
        elif any(each.numel() > 1 for each in given) and not only_shape:
            self.note(f"keeps rows among something else ({name})")  # whose shape does not tell them
        return result

    def _how(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
        if not isinstance(func, OpOverload):
            return f"runs {func}, which cannot be looked into"
        name = func.overloadpacket.__name__
        given = {
            each.name: args[place] if place < len(args) else kwargs.get(each.name, each.default_value)
            for place, each in enumerate(func._schema.arguments)
        }  # fmt: skip
        of_bits = "bitsandbytes" if name in _FEW_BITS and not given.get("threshold") else "aten"
        if func.namespace not in ("aten", "prims", of_bits):
            return f"runs {func}, which cannot be looked into"
        by_value = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*func.tags}
        if (by_value and name not in _INDEXING) or _takes_by_mask(name, given):
            return f"asks what its rows hold ({name})"
        made = [each for each in every_tensor((result,), {}) if each.numel()]
        if not made:
            return None
        if not any(map(self.has_rows, made)):
            return f"makes one of all rows ({name})"
        every = (*every_tensor(args, kwargs), *made)
        if any(_factors(each.shape, self._num_rows) > 1 for each in every):
            return f"sets rows against each other ({name})"
        if name in _VIEWS and self._is_cut_anew(given["self"].shape, made[0].shape):
            return f"lays its rows out anew ({name})"
        sizes = self._worked_along(name, given, made)
        if sizes is None and not func.is_view and torch.Tag.pointwise not in func.tags:
            return f"runs {name}, which is not known to keep rows apart"
        if any(not size % self._num_rows for size in sizes or ()):
            return f"works from row to row ({name})"
        return None

    def _is_cut_anew(self, before: Sequence[int], after: Sequence[int]) -> bool:
        """Whether rows have another size behind them, as by `view(T, B)` where `transpose` was meant."""
        behind = [
            {math.prod(shape[place + 1 :]) for place, size in enumerate(shape) if size == self._num_rows}
            for shape in (before, after)
        ]  # fmt: skip
        return all(behind) and behind[0] != behind[1]

    def _worked_along(
        self, name: str, given: dict[str, Any], made: list[Tensor]
    ) -> list[int] | None:
        """The sizes of the dimensions along which numbers meet, or change their places; None where that
        is not known."""
        first, *_ = given.values()
        tensors = [*every_tensor((*given.values(),), {})]
        if name in _IN_ANY_ORDER:
            return [0]
        if name in _BY_NUMBER or name in _MOVES_DIMS:
            return []
        if name in _INDEXING:
            return [
                first.shape[dim]
                for dim, index in enumerate(given["indices"])
                if index is not None and index.dtype not in (torch.bool, torch.uint8)
            ]
        if name.removesuffix("_") in _PRODUCTS:
            return [[*given.values()][_PRODUCTS[name.removesuffix("_")]].shape[-1]]
        if "convolution" in name or "group_norm" in name:
            # A rule of ours gives each row a copy; of it only the way back is seen here.
            is_ours = "backward" in name and given.get("groups", 1) % self._num_rows == 0
            return [*tensors[0].shape[2 if is_ours else 1 :]]
        if name == "embedding":  # of rows, if they are what is looked up
            return [given["weight"].shape[0]]
        if name == "constant_pad_nd":  # the last dimension's two numbers come first
            pads = given["pad"]
            return [first.shape[-1 - dim // 2] for dim in range(len(pads)) if pads[dim]]
        if name == "repeat":
            times = given["repeats"][len(given["repeats"]) - first.ndim :]
            return [size for size, num in zip(first.shape, times, strict=True) if num > 1]
        if name == "cat":  # several that have rows, one behind the other
            along = [each.shape[given["dim"]] for each in tensors if each.ndim > 1 or each.numel()]
            return along if sum(not size % self._num_rows for size in along) > 1 else []
        if (spatial := _SPATIAL.search(name)) is not None:
            return [*tensors[0].shape[-int(spatial[1]) :]]
        if "batch_norm" in name:
            is_training = given.get("training", given.get("train", "no_training" not in name))
            return [0 if is_training else 1]
        if "_scaled_dot_product" in name:
            return [size for each in tensors if each.ndim == 4 for size in each.shape[-2:]]
        if name.startswith("linalg_") and name != "linalg_vector_norm":
            return [size for each in tensors for size in each.shape[-2:]]
        if "normalized_shape" in given:
            return [*first.shape[-len(given["normalized_shape"]) :]]
        if not {*_OF_DIMS} & {*given}:
            return None
        dims = next((given[each] for each in _OF_DIMS if given.get(each) is not None), ())
        if name in ("roll", "flip") and not dims:
            return [0]
        if not isinstance(first, Tensor) or not first.ndim:
            return []
        every = dims if isinstance(dims, list | tuple) else (dims,)
        # A slice that takes all of a dimension moves nothing.
        is_cut = [name != "slice" or made[0].shape[dim] != first.shape[dim] for dim in every]
        return [first.shape[dim] for dim, cut in zip(every, is_cut, strict=True) if cut]


def _takes_by_mask(name: str, given: dict[str, Any]) -> bool:
    """Whether as many are taken, or written from a list, as a mask has; one number is not counted."""
    if name not in _INDEXING:
        return False
    kinds = (torch.bool, torch.uint8)
    masks = [each for each in given["indices"] if each is not None and each.dtype in kinds]
    return bool(masks) and ("values" not in given or given["values"].numel() > 1)


def _factors(shape: Sequence[int], num_rows: int) -> int:
    """How often the number of rows is a factor of a shape's sizes."""
    count = 0
    for size in shape:
        while size and not size % num_rows:
            size, count = size // num_rows, count + 1
    return count if 0 not in shape else 0


def _is_harmless(how: str) -> bool:
    """Whether it is a rule of ours that runs, what gathers shards, or a mere warning; or autograd that
    takes back a view, which was seen when it was made."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        in_torch = file.startswith(_TORCH)
        is_warning = name == _ONLY_WARNS and file.startswith(_of_transformers())
        if is_warning or (in_torch and f"{os.sep}distributed{os.sep}" in file):
            return True
        if not in_torch and name not in _MODES and file != __file__:
            is_model = not file.startswith(_RULES) or name == _RUNS_MODEL
            if is_model or frame.f_code is not Watch.backward.__code__:
                return not is_model
            break
        frame = frame.f_back
    return "(as_strided)" in how


def _of_transformers() -> str:
    library = sys.modules.get("transformers")
    return "nowhere" if library is None else os.path.dirname(str(library.__file__)) + os.sep


def _same(now: Tensor, old: Tensor) -> bool:
    """Whether nothing was written: what was no number, and still is none, counts as the same."""
    if torch.equal(now, old) or now.shape != old.shape:
        return now.shape == old.shape
    return bool(((now == old) | ((now != now) & (old != old))).all())


def refuse_hooks(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors that show their gradients to somebody."""
    for name, each in named:
        if each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None):
            raise GuaranteeError(
                f"{name} has a hook that is shown its gradients, one person's at a time, before anything is clipped or noisy. "
                "Take it off, as wandb.watch(model, log=None) does."
            )


class Untouched:
    """Refuses a pass that writes into parameters or buffers: nothing would clip that, nor hide it."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._shards = model, shards_of(model)
        self._held: list[Tensor] = []  # at all places, and what is there by its name
        self._named: tuple[dict[str, Tensor], dict[str, nn.Parameter]] = {}, {}
        # What is written into and put back, as some adapters do: compared by value every time. All
        # else is so at the first pass, and after it by torch's count of changes.
        self._put_back: set[str] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, parameters = self._state()
        refuse_hooks(before.items())
        versions = [each._version for each in before.values()]
        copied = before if self._put_back is None else self._put_back
        copies = {name: local(before[name]).detach().to("cpu", copy=True) for name in copied}
        gradients = _gradients(parameters)
        yield
        (after, now_parameters), changed = self._state(), set[str]()
        for (name, tensor), version in zip(before.items(), versions, strict=True):
            now = after.get(name)
            is_as_it_was = tensor._version == version and now is tensor
            if is_as_it_was and self._put_back is not None:
                continue
            old = copies.get(name, None if now is tensor else tensor)
            if now is None or old is None or not _same(local(now).detach().to(old.device), old):
                raise GuaranteeError(
                    f"A pass over text changes {name} itself, as an embedding's max_norm does, or a layer that keeps averages: "
                    "nothing would clip that, and no noise hides it. Switch it off."
                )
            if not is_as_it_was:
                changed.add(name)
        self._put_back = changed if self._put_back is None else self._put_back
        for name, gradient in _gradients(now_parameters).items():
            if gradient != gradients[name]:
                raise GuaranteeError(
                    f"A pass put a gradient of {name} in place, neither clipped nor noisy, as a wrapper does that adds up gradients of "
                    "several processes by itself. Give the model without it."
                )

    def fixed_now(self) -> str:
        """SHA-256 of what is saved with the model and not trained."""
        digest = sha256()
        self._state()
        for module in self._model.modules():
            kept = {**module._buffers, **module._parameters}
            for name, each in kept.items():
                passing = name in module._non_persistent_buffers_set
                if each is not None and not each.requires_grad and not passing:
                    digest.update(name.encode())
                    raw = local(each).detach().cpu().contiguous().flatten().view(torch.uint8)
                    digest.update(raw.numpy())
        return digest.hexdigest()

    def _state(self) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
        """Parameters and buffers by name, and parameters alone. Names are made anew only where other
        tensors are held than the last time: torch takes as long for them as for a small pass."""
        for part in self._shards:  # some of which a pass may leave gathered
            part.reshard()
        held = _held_by(self._model)
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            parameters = dict(self._model.named_parameters())
            self._held = held
            self._named = {**parameters, **dict(self._model.named_buffers())}, parameters
        return self._named


def _held_by(model: nn.Module) -> list[Any]:
    """What every module of a model holds, in an order that follows from the modules."""
    held: list[Any] = []
    modules, seen = [model], {id(model)}
    for module in modules:  # which grows
        held += module._parameters.values()
        held += module._buffers.values()
        for part in module._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                modules.append(part)
    return held


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    grads = {name: each.grad for name, each in parameters.items()}
    return {
        name: (0, 0) if each is None else (id(each), each._version) for name, each in grads.items()
    }
