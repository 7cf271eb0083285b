"""What a trainer may be asked for and what would make its ε untrue, each with what to change.

Everything is refused before the first step: what mixes people's rows, computes another loss than the
one that is clipped, tells or decides by what was measured on private text, or would quietly do nothing.
"""

import os
from collections.abc import Iterator
from typing import Any

import transformers
from torch import nn
from transformers import EarlyStoppingCallback

from tightlip.core.errors import GuaranteeError
from tightlip.core.processes import Processes
from tightlip.privacy.releasing import CorrectedAdam
from tightlip.trainer.leakage_callback import LeakageCallback

# Of the arguments: what is refused when it is set, and why.
_ARGUMENTS = {
    "packing": "puts rows of several people into one",
    "eval_packing": "packs rows, which private training does not",
    "padding_free": "puts rows of several people into one",
    "use_liger_kernel": "replaces layers by kernels that cannot be watched, so that no norm is known",
    "auto_find_batch_size": "changes the batch by what fits into memory, and ε is that of one batch size",
    "neftune_noise_alpha": "adds noise by a row's place in the batch, from a seed that is known, so one person more changes everybody's",
    "label_smoothing_factor": "asks for another loss than the one that is clipped",
    "deepspeed": "adds up gradients in its own way, past clipping and noise",
    "fp16": "scales the loss by who overflows",
    "torch_compile": "hides operations from the watch that clips them",
    "activation_offloading": "has no effect on private passes",
}
# What to do, where that is not to set it to False.
_INSTEAD = {
    "auto_find_batch_size": "Set auto_find_batch_size=False; per_device_train_batch_size bounds the rows in memory.",
    "neftune_noise_alpha": "Leave neftune_noise_alpha out.",
    "label_smoothing_factor": "Set label_smoothing_factor=0.",
    "deepspeed": "Leave deepspeed out.",
    "fp16": "Use bf16=True, or neither.",
    "activation_offloading": "Set activation_offloading=False; fewer rows in memory: a smaller per_device_train_batch_size.",
}
_BY_LENGTH = ("group_by_length", "batch_rebalance")
_NOT_IN_USE = ("summary_", "classifier")  # dropout of heads that a language model has not
_OWN_STEPS = ("training_step", "get_train_dataloader", "get_batch_samples", "_prepare_for_training")
_ON_PUBLIC_TEXT = (
    "Leave it out, or say public_evaluation=True where nobody in that text is to be protected."
)


def refuse_arguments(args: Any) -> None:
    """Refuse what TrainingArguments or SFTConfig ask for and private training cannot give."""
    for why in _against_arguments(args):
        raise GuaranteeError(why)


def refuse_trainer(trainer: Any, ours: type, public_evaluation: bool) -> None:
    """Refuse what else a trainer was given, or made of its arguments; `ours` has the private steps."""
    refuse_arguments(trainer.args)
    reasons = (
        *_against_processes(trainer),
        *_against_losses(trainer, ours),
        *_against_choices(trainer, public_evaluation),
        *_against_model(trainer.model),
        *_against_optimizer(trainer),
    )
    for why in reasons:
        raise GuaranteeError(why)


def _against_arguments(args: Any) -> Iterator[str]:
    for name, why in _ARGUMENTS.items():
        if getattr(args, name, None):
            instead = _INSTEAD.get(name, f"Set {name}=False.")
            yield f"{name}={getattr(args, name)!r} {why}. {instead}"
    if getattr(args, "loss_type", "nll") != "nll":
        yield f"loss_type={args.loss_type!r} is another loss than the one that is clipped. Use loss_type='nll'."
    by_length = getattr(args, "train_sampling_strategy", None)
    if by_length in _BY_LENGTH or getattr(args, "group_by_length", False):
        yield (
            f"train_sampling_strategy={by_length!r} chooses rows by their length, and ε holds for users drawn each by a coin. Leave it "
            "out."
        )
    loading = dict(getattr(args, "model_init_kwargs", None) or {})
    for name, each in {"hub_token": getattr(args, "hub_token", None), **loading}.items():
        if "token" in name and isinstance(each, str):
            yield (
                f"{name} is given, and training_args.bin, which is saved and pushed beside the weights, would hold it. Log in with "
                "`hf auth login`, or set HF_TOKEN."
            )
    if any("underflow" in str(each).lower() for each in args.debug):
        yield "debug='underflow_overflow' prints what private rows activate, before any noise. Leave it out."
    if args.max_grad_norm is None:
        yield "max_grad_norm=None is not a number. Set max_grad_norm=0, and the noisy gradient is not cut as a whole."
    if getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False):
        yield "include_num_input_tokens_seen counts private tokens, and logs the count. Leave it out."


def _against_processes(trainer: Any) -> Iterator[str]:
    started = max(Processes.here().size, int(os.environ.get("WORLD_SIZE", 1)))
    if trainer.args.world_size != started:
        yield f"{started} processes were started, and accelerate joins {trainer.args.world_size}: each would train alone. Without a GPU set use_cpu=True."
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed adds up gradients in its own way, past clipping and noise. Launch the script without it; FSDP2 shards too."
    if trainer.is_fsdp_enabled:
        yield from _against_fsdp(trainer.accelerator.state.fsdp_plugin)
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "The model was spread over processes as it was loaded (distributed_config), past accelerate. Load it whole; FSDP2 shards it."
    axes = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp", "dp_replicate"):
        if getattr(axes, f"{name}_size", None) not in (None, 1):
            yield (
                f"parallelism_config has {name}_size={getattr(axes, f'{name}_size')}, and all rows of a person run on one process, which has, "
                "or gathers, the whole model. Leave it out: DDP or FSDP2 over all processes."
            )
    if getattr(trainer.accelerator, "scaler", None) is not None:
        yield "accelerate's configuration asks for fp16, which scales the loss by who overflows. Use bf16, or none."
    if trainer.args.n_gpu > 1:
        yield (
            f"{trainer.args.n_gpu} GPUs are visible to one process, and DataParallel would split rows among copies that nobody watches. "
            "Make one visible: CUDA_VISIBLE_DEVICES=0."
        )
    if trainer.is_model_parallel:
        yield "The model is spread over several devices (device_map), where it is not clipped as a whole. Load it onto one."


def _against_fsdp(plugin: Any) -> Iterator[str]:
    if plugin.fsdp_version != 2:
        yield (
            "FSDP1 flattens weights and adds up gradients by itself, past clipping and noise. Use FSDP2: fsdp_version: 2 in accelerate's "
            "configuration, or fsdp_config={'version': 2}."
        )
    if "CPU" in type(plugin.cpu_offload).__name__:
        yield "cpu_offload keeps shards where no noise is drawn. Leave it out."
    if "FULL_STATE_DICT" not in str(plugin.state_dict_type):
        yield (
            f"state_dict_type={plugin.state_dict_type} writes weights in parts, which no guarantee can lie beside. Use FULL_STATE_DICT."
        )


def _against_losses(trainer: Any, ours: type) -> Iterator[str]:
    library: Any = next(
        kind
        for kind in type(trainer).__mro__
        if kind.__module__.split(".")[0] in ("transformers", "trl")
    )
    if getattr(trainer.compute_loss, "__func__", None) is not library.compute_loss:
        yield (
            "compute_loss is overridden, and what is clipped is the mean cross-entropy of each row's labels. Remove the override; "
            "what is not to be learnt gets labels of -100."
        )
    for name in _OWN_STEPS:
        found = getattr(getattr(trainer, name), "__func__", None)
        if found is not getattr(ours, name, getattr(library, name)):
            yield f"{name} is overridden, so it is not known that what trains is clipped and noisy. Remove the override."
    inner = trainer.model
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if "_loss_function" in vars(inner):
        yield "model.loss_function was replaced by another loss than the one that is clipped. Take it off."
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func asks for another loss than the one that is clipped. Leave it out."
    if not _is_known(trainer.data_collator):
        kind = type(trainer.data_collator).__name__
        yield (
            f"data_collator is a {kind}, which may change or mix rows, and private training makes its own batches. Put what it does "
            "into the columns input_ids and labels, and leave it out."
        )
    if getattr(trainer, "aux_loss_enabled", False):
        yield (
            "The loss that balances experts is taken over the whole batch: it mixes people's rows and cannot be clipped. Set "
            "router_aux_loss_coef=0.0 in SFTConfig, or in the model's config: from_pretrained(..., router_aux_loss_coef=0.0)."
        )


def _is_known(collator: Any) -> bool:
    """Whether it is known which labels a collator gives to a row."""
    kind, plain = type(collator), transformers.DataCollatorForLanguageModeling
    if kind is plain:
        return not collator.mlm
    of_trl = (kind.__module__, kind.__name__) == ("trl.trainer.sft_trainer", plain.__name__)
    known = (transformers.DataCollatorWithPadding, transformers.DataCollatorForSeq2Seq)
    return of_trl or kind in known or collator is transformers.default_data_collator


def _against_choices(trainer: Any, public_evaluation: bool) -> Iterator[str]:
    callbacks = trainer.callback_handler.callbacks
    audits = [each for each in callbacks if isinstance(each, LeakageCallback)]
    if any(each.fail_on and not each.public for each in audits):
        yield (
            "LeakageCallback has fail_on, so it would stop by what private text leaks, which tells of that text and which ε does not "
            "cover. Leave fail_on out; or say LeakageCallback(..., public=True) where nobody in its corpus is to be protected."
        )
    if public_evaluation:
        return
    if trainer.args.load_best_model_at_end or trainer.args.save_strategy == "best":
        what = "load_best_model_at_end" if trainer.args.load_best_model_at_end else "save_strategy"
        yield f"{what} chooses a checkpoint by what it is worth on private text, which tells of that text. {_ON_PUBLIC_TEXT}"
    if any(isinstance(each, EarlyStoppingCallback) for each in trainer.callback_handler.callbacks):
        yield f"EarlyStoppingCallback stops by what is measured on private text, which tells of that text. {_ON_PUBLIC_TEXT}"
    if trainer.eval_dataset is not None:
        yield f"eval_dataset is given, and what is measured on private text and logged is not covered by ε. {_ON_PUBLIC_TEXT}"


def _against_model(model: nn.Module) -> Iterator[str]:
    if dropout := _dropout(model):
        yield (
            f"The model has dropout ({dropout}). Masks go by a row's place in the batch, so one person more would change everybody's; "
            "private training runs without, by choice, and does not quietly ignore what was asked for. Set it to 0: "
            "lora_dropout=0.0, or from_pretrained(..., NAME=0.0)."
        )
    for name, module in model.named_modules():
        threshold = getattr(getattr(module, "state", None), "threshold", 0)
        if type(module).__name__ == "Linear8bitLt" and threshold:
            yield (
                f"{name} has llm_int8_threshold={threshold:g}: outlier columns are chosen over the whole batch, so one person's row changes "
                "another's. Load the base with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)."
            )


def _against_optimizer(trainer: Any) -> Iterator[str]:
    if isinstance(trainer.optimizer, CorrectedAdam) and trainer.args.max_grad_norm:
        yield (
            f"max_grad_norm={trainer.args.max_grad_norm:g} shrinks gradients and their noise, and CorrectedAdam would take off more "
            "noise than is left. Set max_grad_norm=0."
        )


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _dropout(model: nn.Module) -> str | None:
    """The dropouts that are not zero, in words: as the configuration names them, or the first layer."""
    config: Any = getattr(model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else {}
    named = [
        f"{name} = {value:g}"
        for name, value in told.items()
        if "drop" in name and not name.startswith(_NOT_IN_USE) and _is_share(value)
    ]
    if named:
        return ", ".join(named)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} = {module.p:g}"
    return None
