"""Whether a model asks what its rows hold, to go one way or the other; and whether it changes itself.

`if (ids == 7).any()` is one branch for a whole batch, so that one person's words would decide on
everybody's. Synthetic rows need not hold the words, so what is looked for is the question.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tightlip.core.errors import GuaranteeError
from tightlip.privacy.derived import IN_PLACE, every_tensor
from tightlip.privacy.shards import local, shards_of

_ASKING = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.is_nonzero),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero),
}
# transformers looks for padding there, to say that a mask is missing, and does nothing else with it.
_ONLY_WARNS = "warn_if_padding_and_no_attention_mask"


def asked_of_rows(forward: Callable[[Tensor], Any], ids_BT: Tensor) -> str | None:
    """The question that a model asks of what its rows hold, in words; None where it asks none."""
    asking = _Asking(ids_BT)
    with torch.no_grad(), asking:
        forward(ids_BT)
    return None if asking.question is None else f"asks what its rows hold ({asking.question})"


class _Asking(TorchFunctionMode):
    """Follows what is made of the rows, and notes the first question asked of it."""

    def __init__(self, ids_BT: Tensor) -> None:
        super().__init__()
        self.question: str | None = None
        self._of_rows = {id(ids_BT): ids_BT}  # kept, so that no other tensor gets the `id`

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        hangs = any(id(each) in self._of_rows for each in every_tensor(args, kwargs))
        if hangs and func in _ASKING and not _is_called_by(_ONLY_WARNS):
            self.question = self.question or getattr(func, "__name__", str(func))
        result = func(*args, **kwargs)
        if hangs:
            for each in every_tensor((result, *(args[:1] if func in IN_PLACE else ())), {}):
                if not isinstance(each, nn.Parameter):
                    self._of_rows[id(each)] = each
        return result


def _is_called_by(name: str) -> bool:
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code.co_name == name:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Untouched:
    """Refuses a pass that writes into parameters or buffers: nothing would clip that, nor hide it."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._shards = model, shards_of(model)
        # What is written into and put back, as some adapters do: compared by value every time. All
        # else is so at the first pass, and after it by torch's count of changes.
        self._put_back: set[str] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = self._state()
        for name, (tensor, _) in before.items():
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                raise GuaranteeError(
                    f"{name} has a hook that is shown its gradients, one person's at a time, before anything is clipped or noisy. "
                    "Take it off, as wandb.watch(model, log=None) does."
                )
        copied = before if self._put_back is None else self._put_back
        copies = {name: local(before[name][0]).detach().to("cpu", copy=True) for name in copied}
        gradients = self._gradients()
        yield
        after, changed = self._state(), set[str]()
        for name, (tensor, version) in before.items():
            now, now_version = after.get(name, (None, -1))
            if now is tensor and now_version == version and self._put_back is not None:
                continue
            old = copies.get(name, None if now is tensor else tensor)
            if (
                now is None
                or old is None
                or not torch.equal(local(now).detach().to(old.device), old)
            ):
                raise GuaranteeError(
                    f"A pass over text changes {name} itself, as an embedding's max_norm does, or a layer that keeps averages: "
                    "nothing would clip that, and no noise hides it. Switch it off."
                )
            if now is not tensor or now_version != version:
                changed.add(name)
        self._put_back = changed if self._put_back is None else self._put_back
        for name, gradient in self._gradients().items():
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

    def _gradients(self) -> dict[str, tuple[int, int]]:
        grads = {name: each.grad for name, each in self._model.named_parameters()}
        return {
            name: (0, 0) if each is None else (id(each), each._version)
            for name, each in grads.items()
        }

    def _state(self) -> dict[str, tuple[Tensor, int]]:
        for part in self._shards:  # some of which a pass may leave gathered
            part.reshard()
        every = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {name: (each, each._version) for name, each in every.items()}
