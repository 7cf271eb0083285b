"""A PEFT adapter on its base: checked before it is believed, applied unmerged, and switched off.

Merging rounds, so a merged model is not the one that is served. Nothing is fetched and nothing in
the folder is executed: of adapter_config.json only settings that are known here are passed on, and
weights come from safetensors alone.
"""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.models import folders
from tightlip.models.checks import check_size, first_of, usage_errors, without_memory
from tightlip.models.loading import read_configuration

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# What decides what an adapter of each kind computes.
USED = {
    "LORA": (
        *("r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "bias"),
        *("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "init_lora_weights"),
        *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
        *("trainable_token_indices", "ensure_weight_tying"),
    ),
    "IA3": (
        *("target_modules", "exclude_modules", "feedforward_modules", "modules_to_save"),
        "fan_in_fan_out",
    ),
}
# How it was trained, by what and on what: nothing that is computed afterwards.
UNUSED = {
    *("peft_type", "task_type", "peft_version", "inference_mode", "revision", "lora_dropout"),
    *("base_model_name_or_path", "megatron_core", "qalora_group_size", "init_ia3_weights"),
    *("auto_mapping", "eva_config"),
}
# Initialisations that leave the base as it was, and those that take their part out of it again
# each time the adapter is put on, always the same one.
LEAVES_BASE = (True, False, None, "gaussian")
TAKEN_FROM_BASE = ("pissa", "olora")
ONCE_FROM_ELSEWHERE = ("orthogonal", "eva")
# What PEFT calls whole embeddings, which it stores too where it noticed that the vocabulary grew.
WHOLE = ("", ".base_layer", ".modules_to_save", ".original_module")
SECONDS_TO_MATCH = 2.0


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter's folder and its base's, and what its adapter_config.json says.

    `tokenizer` is the folder that has one: its own, that of the output folder it lies in, or the
    base. `shares_base` tells whether the model with the adapter switched off is the base.
    """

    folder: Path
    base: Path
    tokenizer: Path
    written: dict[str, Any]
    shapes: dict[str, list[int]]
    shares_base: bool = False

    def fingerprint(self, of: Callable[[Path], str]) -> str:
        """A fingerprint `of` both folders."""
        return hashlib.sha256(f"{of(self.folder)} on {of(self.base)}".encode()).hexdigest()

    def applied(self, model: nn.Module) -> nn.Module:
        """The base with the adapter's layers in it, unmerged.

        Holds:
            unmerged: its predictions are those of PEFT's own forward pass.
        """
        from peft import set_peft_model_state_dict

        with usage_errors(self.folder):
            adapted = self._with_layers(model)
            self._place_beside_offloaded(adapted)
            set_peft_model_state_dict(adapted, load_file(checked(self.folder / WEIGHTS)))
            return adapted.get_base_model().requires_grad_(False)

    def _with_layers(self, model: nn.Module) -> Any:
        from peft import PeftModel

        if (rows := self._num_rows(model)) is not None:
            model.resize_token_embeddings(rows, mean_resizing=False)
        config = _peft_config(self, [name for name, _ in model.named_modules()])
        with warnings.catch_warnings():  # which speak to whoever trains
            warnings.simplefilter("ignore")
            return PeftModel(model, config)

    def _place_beside_offloaded(self, model: nn.Module) -> None:
        """An adapter's layers go where accelerate computes the layer that they stand at."""
        for module in model.modules():
            hook = getattr(getattr(module, "base_layer", None), "_hf_hook", None)
            if (device := getattr(hook, "execution_device", None)) is not None:
                for name, child in module.named_children():
                    if name != "base_layer":
                        child.to_empty(device=device)
        is_offloaded = any(weight.is_meta for weight in model.parameters())
        if is_offloaded and (self.written.get("use_dora") or self.written.get("modules_to_save")):
            raise UsageError(
                f"{self.folder} is a DoRA or replaces whole modules, whose base may not lie on disk or, for a GPU, in "
                "memory. Leave --device-map out, or merge the adapter into its base first."
            )

    def _num_rows(self, model: nn.Module) -> int | None:
        """How many tokens the adapter's embeddings are for; None where the base's are kept."""
        rows = {self.shapes[key][0] for key in self._embedding_keys(model)}
        if len(rows) > 1:
            raise UsageError(
                f"{self.folder} has embeddings for {' and for '.join(map(str, sorted(rows)))} tokens. Save it again."
            )
        own = model.get_input_embeddings().num_embeddings
        return rows.pop() if rows and rows != {own} else None

    def _embedding_keys(self, model: nn.Module) -> list[str]:
        """Stored weights of whole embeddings and output layers."""
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        names = [name for name, module in model.named_modules() if any(module is x for x in layers)]
        keys = [f"{PREFIX}{name}{end}.weight" for name in names for end in WHOLE]
        return [key for key in keys if key in self.shapes]

    def checked_against_base(self) -> "Adapter":
        """The same, once every tensor is known to have its place in the base and the other way round.

        The base is built without memory, so an adapter of any size is refused before it takes some.
        """
        from peft import get_peft_model_state_dict

        config = read_configuration(self.base)
        with without_memory(), usage_errors(self.folder):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            is_resized, embeddings = self._num_rows(model) is not None, self._embedding_keys(model)
            adapted = self._with_layers(model)
            wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        whole = {key for key in embeddings if key not in wanted}
        for keys, what in (
            (wanted.keys() - self.shapes, "lacks weights that its settings ask for"),
            (self.shapes.keys() - wanted - whole, "has weights that have no place in the base"),
            (
                {key for key in wanted if [*wanted[key].shape] != self.shapes.get(key)},
                "has weights of another shape than its settings and the base ask for",
            ),
        ):
            if keys:
                raise UsageError(
                    f"The adapter in {self.folder} {what}: {first_of(keys)}. Every result would be of another model. Give "
                    f"the base it was trained on (here {self.base}) with --base, or save it again with save_pretrained."
                )
        alone = leaves_base_alone(self.written) and not is_resized and not whole
        return Adapter(**vars(self) | {"shares_base": alone})


def leaves_base_alone(settings: dict[str, Any]) -> bool:
    """Whether training with these settings changed nothing but the adapter.

    With bias="all" the base's own biases were trained: switched off, such a model was 0.83 away
    from its base.
    """
    return (
        settings.get("bias") in (None, "none")
        and settings.get("init_lora_weights") in LEAVES_BASE
        and not settings.get("trainable_token_indices")
    )


def open_adapter(folder: Path, *, name: str | None = None, base: Path | None = None) -> Adapter:
    """The adapter in `folder`, or in its sub-folder `name`; `base` goes before the base it names.

    Holds:
        nothing_fetched: a base that is not a folder here is a usage error.
        nothing_executed: weights are read from safetensors only, and unknown settings refused.
        nothing_made_up: a missing tensor, or one too many, is a usage error.
    """
    if name is not None:
        folder = _named(folder, name)
    if find_spec("peft") is None:
        raise UsageError(
            f"{folder} holds a PEFT adapter, and peft is missing. Run: pip install 'tightlip[lora]'"
        )
    folders.refuse_odd_files(folder)
    path = checked(folder / folders.ADAPTER_CONFIG)
    written = read_json(path)
    if not isinstance(written, dict):
        raise UsageError(f"{path} is not a JSON object. Save or download the adapter again.")
    _check_settings(path, written)
    place = base or _named_base(path, written.get("base_model_name_or_path"))
    _check_base(folder, place)
    is_within = name is not None or folder.name.startswith("checkpoint-")
    tokenizers = [folder, *([folder.parent] if is_within else [])]
    return Adapter(
        folder=folder,
        base=place,
        tokenizer=next((each for each in tokenizers if folders.has_tokenizer(each)), place),
        written=written,
        shapes=_stored_shapes(folder),
    ).checked_against_base()


def _named(folder: Path, name: str) -> Path:
    if Path(name).name == name and folders.is_adapter(folder / name):
        return folder / name
    there = folders.adapters_in(folder) if folder.is_dir() else []
    known = f"It has: {', '.join(there)}." if there else "It has none in sub-folders."
    raise UsageError(f"{folder} has no adapter {name!r}. {known}")


def _named_base(path: Path, named: Any) -> Path:
    """The base that the adapter names, where that is a folder here."""
    place = Path(named) if isinstance(named, str) and named.isprintable() else None
    if place is not None and ".." in place.parts:
        raise UsageError(
            f"{path} names its base by a path that leads upwards ({named}). Say which folder is meant: --base DIR"
        )
    if place is None or not named or not place.is_dir():
        raise UsageError(
            f"{path} names {named!r} as its base, which is not a folder here, and nothing is ever fetched on an adapter's "
            "word. Download the base and give its folder, or its address on a store: --base DIR"
        )
    return place


def _check_base(folder: Path, base: Path) -> None:
    if folders.is_adapter(base) or folders.gguf_file(base) is not None:
        kind = "an adapter itself" if folders.is_adapter(base) else "a GGUF file"
        raise UsageError(f"{base} is {kind}, and {folder} needs a model's folder as its base.")
    config = read_configuration(base)
    check_size(base, AutoModelForCausalLM, config, folders.stored_shapes(base))


def _check_settings(path: Path, written: dict[str, Any]) -> None:
    """Refuse what is not known here: it may fetch, execute, or simply compute something else."""
    from peft import IA3Config, LoraConfig

    kind = written.get("peft_type")
    if not isinstance(kind, str) or kind not in USED:
        raise UsageError(
            f"{path} is of type {kind!r}. tightlip applies LoRA, DoRA and IA3; merge others into their base."
        )
    library = (written.get("auto_mapping") or {}).get("parent_library", "transformers.")
    if not str(library).startswith(("transformers.", "tightlip.models.")):
        raise UsageError(f"{path} asks for code from {library!r}, which tightlip never executes.")
    start = written.get("init_lora_weights")
    if not any(
        start is one or start == one
        for one in (*LEAVES_BASE, *TAKEN_FROM_BASE, *ONCE_FROM_ELSEWHERE)
    ):
        raise UsageError(
            f"{path} says init_lora_weights={start!r}: its base was changed when training began, in a way that cannot be "
            "repeated exactly. Convert it when you save it (path_initial_model_for_weight_conversion), or merge it."
        )
    known = {"LORA": LoraConfig, "IA3": IA3Config}[kind]()
    for key in written.keys() - {*USED[kind]} - UNUSED:
        if written[key] not in (None, False, {}, [], getattr(known, key, None)):
            raise UsageError(
                f"{path} sets {key}={str(written[key])[:80]!r}, which tightlip does not apply. Merge the adapter into its "
                "base where you trust it, and audit that."
            )


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor, by the header of the file alone."""
    path = folder / WEIGHTS
    if not path.is_file():
        there = "adapter_model.bin"
        if (folder / there).exists():
            raise UsageError(
                f"{folder} has its weights in {there}, a pickle, and unpickling can execute any code. Where you trust it, "
                "load it with peft and save it again with save_pretrained, which writes safetensors."
            )
        raise UsageError(f"{folder} has no {WEIGHTS}. Save the adapter with save_pretrained.")
    return folders.shapes_in(checked(path), of="adapter")


def _peft_config(adapter: Adapter, modules: list[str]) -> Any:
    """PEFT's settings, with what the adapter says in regular expressions said in names.

    PEFT would match them without end: an adapter's maker may write any.
    """
    from peft import IA3Config, LoraConfig

    written, place = adapter.written, adapter.folder / folders.ADAPTER_CONFIG
    kind = written["peft_type"]
    used = {key: written[key] for key in USED[kind] if written.get(key) is not None}
    for key in ("target_modules", "exclude_modules", "feedforward_modules"):
        if isinstance(used.get(key), str) and used[key] != "all-linear":
            pattern = used[key]
            used[key] = [name for name in modules if _matches(pattern, name, place)]
    adapted = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in adapter.shapes}
    for key in ("rank_pattern", "alpha_pattern"):
        if key in used:
            used[key] = _by_module(used[key], sorted(adapted - {""}), place)
    patterns = used.get("layers_pattern") or []
    for name in [patterns] if isinstance(patterns, str) else patterns:
        if not re.fullmatch(r"[\w.]+", str(name)):
            raise UsageError(f"{place} has layers_pattern={name!r}, which is not a plain name.")
    if kind == "IA3":
        return IA3Config(**used, task_type="CAUSAL_LM", inference_mode=True)
    if used.get("init_lora_weights") not in TAKEN_FROM_BASE:
        used["init_lora_weights"] = False  # the numbers come from the file
    return LoraConfig(**used, task_type="CAUSAL_LM", inference_mode=True)


def _by_module(by_pattern: dict[str, Any], modules: list[str], place: Path) -> dict[str, Any]:
    """What each module gets: the value of the first pattern that its name ends with."""
    found = {}
    for name in modules:
        for pattern, value in by_pattern.items():
            if _matches(rf"(.*\.)?({pattern})", name, place):
                found[f"^{re.escape(name)}"] = value
                break
    return found


def _matches(pattern: str, name: str, place: Path) -> bool:
    import regex  # which comes with transformers and, unlike Python's own, can be told to give up

    try:
        return regex.fullmatch(pattern, name, timeout=SECONDS_TO_MATCH) is not None
    except (TimeoutError, regex.error) as error:
        raise UsageError(
            f"{place} has a pattern that cannot be matched ({error}): {pattern[:80]!r}. List modules by name."
        ) from error


def active_configs(model: nn.Module) -> list[Any]:
    """Of a model in memory, the settings of the adapters that are switched on."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return []
    active = getattr(model, "active_adapters", None)
    names = active() if callable(active) else active or getattr(model, "active_adapter", [])
    return [configs[name] for name in ([names] if isinstance(names, str) else names)]


def without_wrapper(model: Any) -> Any:
    """The model inside a PeftModel, adapters and all; one with a learnt prompt is left as it is."""
    configs = active_configs(model)
    if not hasattr(model, "get_base_model") or any(one.is_prompt_learning for one in configs):
        return model
    return model.get_base_model()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base; afterwards it is as it was, down to what is trainable."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers = [each for each in model.modules() if isinstance(each, kinds)]
    layers = [layer for layer in layers if not layer.disable_adapters]
    trainable = [(weight, weight.requires_grad) for weight in model.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for weight, was_trainable in trainable:
            if weight.requires_grad != was_trainable:
                weight.requires_grad_(was_trainable)


def is_merged(model: nn.Module) -> bool:
    """Whether an adapter is merged, so that taking it out again would round."""
    return any(getattr(module, "merged", False) is True for module in model.modules())
