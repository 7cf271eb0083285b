"""LoRA adapters on a frozen model: what they stand on, where they go, how they are kept."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.files import read_json, write_json
from tightlip.models.folders import ADAPTER_CONFIG, gguf_file
from tightlip.models.loading import load_causal_lm, read_configuration
from tightlip.models.recurrent import RecurrentForCausalLM
from tightlip.privacy.per_unit import keep_differentiable
from tightlip.training.config import TrainConfig


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The weights of the adapters by name; state_dict() of layers in few bits is no mere reading."""
    return {name: each.data for name, each in model.named_parameters() if each.requires_grad}


def adapted_model(config: TrainConfig, device: torch.device | str) -> Any:
    """The model in the folder `config.model`, frozen as it was stored, with adapters to train.

    Draw from torch's global generator: seed it first.
    """
    if gguf_file(Path(config.model)) is not None:
        raise UsageError(
            f"{config.model} is a GGUF file, and an adapter needs a base that others can put it on. Give --model the folder "
            "that the file was made from."
        )
    # Small updates are lost in the adapters' weights if anywhere, and those are float32.
    dtype = read_configuration(Path(config.model)).dtype
    if dtype == torch.float16:
        dtype = torch.float32  # whose small gradients would be 0 on their way back
    return load_causal_lm(
        config.model,
        device=device,
        dtype=dtype,
        quantize=config.load_in,
        int8_threshold=0.0,  # or one row of a batch would change how others are rounded
        adapted=partial(with_adapters, config=config),
    )


def with_adapters(model: PreTrainedModel, config: TrainConfig) -> Any:
    """The model frozen, with LoRA adapters in float32 on its linear layers to train instead.

    Holds:
        starts_there: before the first step its predictions are the base's.
        named: a layer that is not there, or cannot be adapted, is a usage error.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("lora needs peft. Run: pip install 'tightlip[lora]'") from error
    assert config.lora is not None
    if isinstance(model, RecurrentForCausalLM):
        raise UsageError(
            f"lora={config.lora} adapts linear layers, and a recurrent model has only its output layer. Use a Transformer's "
            "folder, or leave lora out."
        )
    for target in config.lora_targets or ():
        _check_target(model, target)
    keep_differentiable(model)
    settings = LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha or 2 * config.lora,  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=list(config.lora_targets or ()) or "all-linear",
        task_type="CAUSAL_LM",
    )
    # That GPT-2's weights lie the other way round, which PEFT sees to.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, settings)
    settings.base_model_name_or_path = str(Path(config.model).resolve())
    return adapted


def _check_target(model: PreTrainedModel, target: str) -> None:
    """Refuse a name that PEFT would pass over, or put on what a merged model shares with another layer."""
    head = model.get_output_embeddings()
    can = {
        name: isinstance(module, nn.Linear | Conv1D) and module is not head
        for name, module in model.named_modules()
        if name
    }
    meant = [name for name in can if name == target or name.endswith(f".{target}")]
    if not meant or not all(can[name] for name in meant):
        there = sorted({name.rpartition(".")[2] for name in can if can[name]})
        what = f"{meant[0]} is not a linear layer inside the model" if meant else "no layer has it"
        raise UsageError(
            f"lora_targets has {target!r}, and {what}. Layers that can be adapted: {', '.join(there)}."
        )


def check_rows_stay_alone(model: Any) -> None:
    """Refuse, under private training, eight-bit layers that look at all rows of a batch."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "state", None), "threshold", 0):
            raise GuaranteeError(
                f"{name} is held in 8 bits with llm_int8_threshold={module.state.threshold:g}: columns to be kept whole are chosen "
                "over all rows of a batch, so one user would change another's gradient. Give the unquantised model with "
                "--load-in 8bit, which has no threshold here, or --load-in 4bit."
            )


def save_adapter(folder: Path, model: Any, tensors: dict[str, Tensor] | None = None) -> None:
    """Write the adapter as PEFT does, the same bytes for the same weights."""
    tensors = adapter_tensors(model) if tensors is None else tensors
    model.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
    path = folder / ADAPTER_CONFIG
    written = read_json(path)
    # Out of a set, whose order is another in every process.
    written["target_modules"] = sorted(written["target_modules"])
    write_json(path, written)


def merged_model(adapter: Path) -> PreTrainedModel:
    """The base that an adapter of ours names, in its own precision, with the adapter added to its weights."""
    from peft import PeftModel

    base = load_causal_lm(read_json(adapter / ADAPTER_CONFIG)["base_model_name_or_path"])
    merged: PreTrainedModel = PeftModel.from_pretrained(base, adapter).merge_and_unload()  # type: ignore[operator]
    return merged


def check_mergeable(config: TrainConfig) -> None:
    """Refuse --merge where there is nothing to merge, or no weights that could take it up."""
    if config.lora is None:
        raise UsageError("merge=True is about adapters. Add --lora 16, or leave it out.")
    if getattr(read_configuration(Path(config.model)), "quantization_config", None) is not None:
        raise UsageError(
            f"{config.model} is quantised, and merging an adapter would round it to what few bits can hold. Do not merge, "
            "or train on the unquantised model with --load-in 4bit."
        )
