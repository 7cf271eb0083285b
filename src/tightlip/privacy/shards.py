"""Models whose weights are sharded over several processes by FSDP2.

While a layer runs its weights are gathered: other tensors than the shards that are kept in between,
always the same ones, which is what a pass can watch.
"""

import sys
from typing import Any

from torch import Tensor, nn

from tightlip.core.errors import UsageError
from tightlip.core.processes import Processes
from tightlip.privacy.clipping import trainable_parameters

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def shards_of(model: nn.Module) -> list[Any]:
    """The parts of a model that FSDP2 has sharded; none of an ordinary one."""
    if "torch.distributed.fsdp" not in sys.modules:  # which takes a while to import
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def resharded(model: nn.Module) -> nn.Module:
    """The model with every weight back in its shards, where a pass has left some gathered."""
    for module in shards_of(model):
        module.reshard()
    return model


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes, a shared parameter once under its first name, as a pass meets it: of a
    sharded model the gathered ones, which are there, empty, also while they are not gathered."""
    kept = kept_parameters(model)
    whole = dict(kept)
    for module in shards_of(model):  # one after the other: all of them need not fit into memory
        module.unshard()
        now = trainable_parameters(model)
        whole |= {name: now[name] for name in kept if now[name] is not kept[name]}
        module.reshard()
    return whole


def kept_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The same as they are kept, and as an optimizer has them: of a sharded model its shards."""
    return trainable_parameters(resharded(model))


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """What this process has of a tensor, in the same memory."""
    own: Tensor = tensor.detach().to_local() if is_shard(tensor) else tensor
    return own


def check_shards(model: nn.Module, processes: Processes, way: str) -> None:
    """Refuse a sharded model whose shards or passes are not as they are owned here."""
    for module in model.modules():
        if type(module).__name__ in _WRAPPERS:
            raise UsageError(
                f"The model has a {type(module).__name__} in it, which adds up gradients by itself, past clipping and noise. Give the "
                "model inside it (model.module); what several processes find is added up here."
            )
    spread = [name for name, each in model.named_parameters() if is_shard(each)]
    if not shards_of(model):
        if spread:
            raise UsageError(
                f"{spread[0]} is spread over processes, and not by fully_shard, so no pass has it whole. Load the model whole."
            )
        return
    if way != "eager":
        raise UsageError(
            f"way={way!r} with a model that is sharded by FSDP2, whose weights are gathered layer by layer in an ordinary pass only. "
            "Use way='eager', or give every process the whole model."
        )
    gathered = whole_parameters(model)
    for name, each in kept_parameters(model).items():
        if not is_shard(each):
            continue  # whole on every process
        shard: Any = each
        mesh, (placement, *more) = shard.device_mesh, shard.placements
        if more or not placement.is_shard(0) or mesh.size() != processes.size:
            raise UsageError(
                f"{name} is spread as {shard.placements} over {mesh.size()} of {processes.size} processes. Use fully_shard over all of "
                "them, along the first dimension: no replicas of shards, and no tensor parallelism."
            )
        if each.device.type != mesh.device_type:
            raise UsageError(
                f"{name} is offloaded to {each.device}, and noise is drawn where passes run. Leave offload_policy out."
            )
        if gathered[name].dtype != each.dtype:
            raise UsageError(
                f"{name} is kept in {each.dtype} and gathered in {gathered[name].dtype}. Leave mp_policy out; bf16=True runs "
                "passes in bfloat16."
            )


def check_has_rules(model: nn.Module, unruly: str) -> None:
    """Refuse a sharded model that is not covered: processes gather its layers together, and those with
    more rows to run one after the other would wait for the rest."""
    if shards_of(model):
        raise UsageError(
            f"No fast rule covers {unruly}, and a model that is sharded by FSDP2 cannot run row after row. Give every process the whole "
            "model (DDP), or freeze that layer."
        )
