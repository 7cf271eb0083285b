"""The model a run starts from, and the one it leaves: made, loaded, checked, saved."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tightlip.core.errors import TightlipError, UsageError
from tightlip.core.figures import guarantee_words, shown_first, standing_words
from tightlip.core.files import folder_written_whole, read_json, read_text, write_json, write_text
from tightlip.core.processes import Processes
from tightlip.core.register import OWN_RECORD, guarantee_beside, taken_back
from tightlip.core.run_folder import LEDGER, MERGED, MODEL, RunRecord, run_around, write_ledger
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.history import learnt_from
from tightlip.corpus.prepare import corpus_id
from tightlip.models.checks import check_room, is_quantised, without_progress_bar
from tightlip.models.configurations import GRUConfig, LSTMConfig, TransformerConfig
from tightlip.models.folders import model_fingerprint
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.models.recurrent import GRUForCausalLM, LSTMForCausalLM
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy.people import runs_before, withdraw
from tightlip.training import lora, together
from tightlip.training.config import BUILT_IN_MODELS, RunOptions, TrainConfig

_BUILT_IN: dict[str, Any] = {
    "lstm": (LSTMConfig, LSTMForCausalLM),
    "gru": (GRUConfig, GRUForCausalLM),
    "transformer": (TransformerConfig, TransformerForCausalLM),
}
_OF_ALL = ("hidden_size", "num_layers", "dropout", "tie_word_embeddings")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Of a model's card, before and after its noise.
_ABOUT_THE_STEPS = ("mechanism", "adjacency", "sampling", "accountant", "steps", "planned_steps")
_ABOUT_THE_PROMISE = (
    *("clip_norm", "sampling_rate", "documents_per_owner", "documents_taken", "covers", "outside"),
)
# Of an adaptive run, as `tightlip ledger` has them.
_ABOUT_THE_MODE = ("least_clip", "gamma_floor", "release_noise", "averaging", "least_weight")
_ABOUT_THE_WEIGHTS = ("normalisation", "estimator", "model", "public_corpus")


def starting_model(config: TrainConfig, tokenizer: Any, device: torch.device | str = "cpu") -> Any:
    """A new model of the asked shape, or the one in the folder `config.model`, on `device`; with
    adapters where they are asked for.

    Draw from torch's global generator: seed it first.
    """
    if config.lora is not None:  # not moved afterwards: weights in few bits cannot be
        return lora.adapted_model(config, device)
    if config.model not in BUILT_IN_MODELS:
        # Weights stored in half precision would lose small updates.
        model = load_causal_lm(config.model, dtype=torch.float32)
        if is_quantised(model):
            raise UsageError(
                f"{config.model} is quantised, and weights in few bits cannot be trained. Add --lora 16 to train adapters on it, or "
                "give the unquantised model."
            )
        return model.to(device)
    return _new_model(config, tokenizer).to(device)


def model_to_train(
    config: TrainConfig, options: RunOptions, tokenizer: Any, device: torch.device, largest_id: int
) -> Any:
    """The model to start from, which ids up to `largest_id` fit; or, where its weights are to be split,
    this process' part of each of them."""
    processes = Processes.here()
    splits = options.fsdp and processes.are_several  # one process has nothing to split
    # The whole of what is split might not fit on one GPU.
    model = starting_model(config, tokenizer, "cpu" if splits else device)
    check_fits(model, config, largest_id)
    together.begin_alike(processes, model)
    if splits:
        together.check_splits(config, options, model)
        together.split_weights(model, device, processes)
    return model


def _new_model(config: TrainConfig, tokenizer: Any) -> PreTrainedModel:
    common = {
        "vocab_size": len(tokenizer),
        **{name: getattr(config, name) for name in _OF_ALL},
        **{name: getattr(tokenizer, name) for name in _SPECIAL_TOKENS},
    }
    own: dict[str, Any] = {"embedding_size": config.embedding_size}
    if config.model == "transformer":
        own = {"num_heads": config.num_heads, "max_position_embeddings": config.sequence_length}
    config_class, model_class = _BUILT_IN[config.model]
    shape = config_class(**own, **common)
    check_room(model_class, shape)
    return model_class(shape)


def check_start(config: TrainConfig, tokenizer: Any, corpus_folder: Path) -> dict[str, str]:
    """What identifies a folder to start from; refuse one that reads other tokens than the corpus."""
    if config.model in BUILT_IN_MODELS:
        return {}
    own = load_tokenizer(config.model)
    if tokenizer_fingerprint(own) != tokenizer_fingerprint(tokenizer):
        raise UsageError(
            f"{corpus_folder} was prepared with another tokenizer than that of {config.model}, so ids would mean other "
            f"words. Run: tightlip prepare CORPUS --tokenizer {config.model} --out DIR"
        )
    return {"model_fingerprint": model_fingerprint(Path(config.model))}


def runs_behind(config: TrainConfig) -> list[dict[str, Any]]:
    """The private runs that the model to start from came out of, the last one first."""
    if config.model in BUILT_IN_MODELS:
        return []
    run = run_around(Path(config.model))
    ledger = {} if run is None else run.guarantee
    record = guarantee_beside(Path(config.model)) or ledger
    # A snapshot of an earlier version does not say how many steps were planned.
    most = max(record.get("steps") or 0, ledger.get("steps") or 0)
    return runs_before(record | {"steps": most})


def check_fits(model: PreTrainedModel, config: TrainConfig, largest_id: int) -> None:
    """Refuse rows that are longer, or ids that are larger, than the model knows."""
    about = model.config.get_text_config()
    positions = getattr(about, "max_position_embeddings", None)
    if positions is not None and config.sequence_length > positions:
        raise UsageError(
            f"sequence_length={config.sequence_length} is more than the {positions} positions of {config.model}. "
            f"Use sequence_length={positions} or less."
        )
    if largest_id >= about.vocab_size:
        raise UsageError(
            f"The corpus has token id {largest_id}, and {config.model} has a vocabulary of {about.vocab_size}. "
            f"Prepare the corpus with the model's own tokenizer."
        )


def save_model(
    folder: Path,
    model: Any,
    tokenizer: Any,
    guarantee: dict[str, Any],
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face folder, whole or not at all; an earlier one gives way. Of a model with
    adapters it holds these and the path of their base. `tensors` are those of `saved_tensors`."""
    if folder.exists():
        shutil.rmtree(folder)
    with folder_written_whole(folder) as beside, without_progress_bar():
        base = None
        if lora.has_adapters(model):
            lora.save_adapter(beside, model, tensors)
            base = model.peft_config["default"].base_model_name_or_path
        else:
            model.save_pretrained(beside, state_dict=tensors)
        tokenizer.save_pretrained(beside)
        write_text(beside / "README.md", model_card(guarantee, base))
        write_json(beside / "guarantee.json", told_of(guarantee))


def saved_tensors(model: Any) -> dict[str, Tensor] | None:
    """What is saved of a model whose weights are split over processes, whole on the first of them;
    None where every process has them. All must ask."""
    if not together.has_split_weights(model):
        return None
    trained = (
        lora.adapter_tensors(model)
        if lora.has_adapters(model)
        else model.state_dict(keep_vars=True)
    )
    return together.whole_tensors(trained)


def told_of(guarantee: dict[str, Any]) -> dict[str, Any]:
    """What a model's folder holds of a guarantee."""
    # Whether the run went on after these weights is no matter of theirs, and to quote is the
    # ε of all planned steps.
    left_out = ("finished", "epsilon_so_far")
    return {name: value for name, value in guarantee.items() if name not in left_out}


def save_merged(run: Path) -> None:
    """Write RUN/merged: what RUN/model is with the adapter in the weights, under the same promise."""
    adapter = run / MODEL
    guarantee = read_json(adapter / OWN_RECORD)
    save_model(run / MERGED, lora.merged_model(adapter), load_tokenizer(adapter), guarantee)


def origin_told(config: TrainConfig, corpus: Path, card: dict[str, Any]) -> dict[str, Any]:
    """Which text and which private runs shaped the weights, as a copy of the model will tell."""
    start = None if config.model in BUILT_IN_MODELS else Path(config.model)
    is_private = card.get("epsilon") is not None
    with suppress(TightlipError, OSError):  # of an earlier version, and perhaps not to be written
        corpus_id(corpus)
    before = runs_behind(config)
    return {
        "learnt_from": learnt_from(corpus, start, is_private=is_private),
        **({"before": before} if before else {}),
    }


def model_card(guarantee: dict[str, Any], base: str | None = None) -> str:
    """Markdown for the README of a model, or of an adapter on `base`. Nothing measured on private
    text goes in.

    Holds:
        full_and_least: where noise varies, σ and the least that a step can have are told apart.
    """
    library = "transformers" if base is None else f"peft\nbase_model: {json.dumps(base)}"
    head = f"---\nlibrary_name: {library}\ntags: [tightlip]\n---"
    lines = (head, "", "# A language model trained by tightlip", "", *guarantee_lines(guarantee))
    return "\n".join(lines) + "\n"


def guarantee_lines(guarantee: dict[str, Any]) -> list[str]:
    """What a card says of a guarantee."""
    rows = [f"| {name} | {_cell(value)} |" for name, value in _rows(guarantee)]
    return [*_headline(guarantee), "", "| | |", "|---|---|", *rows]


def take_back(run: RunRecord, because: str, **found: Any) -> str:
    """Put on record that a finished run's promise is none: in the register, in the ledger and beside
    every model of the run. The reason on record, which is the first that there was."""
    lost = run.guarantee
    lost = lost if lost.get("withdrawn") else taken_back(lost, because, **found)
    if lost.get("run"):
        withdraw(lost, run.folder / LEDGER)
    write_ledger(run.folder, lost)
    tell_beside_models(run, lost)
    return str(lost["because"])


def tell_beside_models(run: RunRecord, lost: dict[str, Any]) -> None:
    """Tell beside each model of a run that its promise is `lost`, where one still stands."""
    for folder in (run.model_folder, run.folder / MERGED, *(one.folder for one in run.snapshots)):
        there = read_json(folder / OWN_RECORD) if (folder / OWN_RECORD).is_file() else {}
        if there.get("epsilon") is None:
            continue
        told = taken_back(there, lost["because"])
        told["withdrawn"] = lost.get("withdrawn", told["withdrawn"])
        card, before, after = folder / "README.md", guarantee_lines(there), guarantee_lines(told)
        # One that somebody wrote on keeps their words.
        text = read_text(card) if card.is_file() else ""
        text = text.replace("\n".join(before), "\n".join(after))
        write_text(card, text if after[0] in text else "\n".join([text, *after, ""]))
        write_json(folder / OWN_RECORD, told)


def _headline(guarantee: dict[str, Any]) -> list[str]:
    lines = [f"**{standing_words(guarantee).capitalize()}.** {guarantee['because']}"]
    if guarantee.get("epsilon") is not None:
        first = shown_first(guarantee) or guarantee
        proved = first["standing"] == "proved"
        claim = "Differentially private: " if proved else "No guarantee, a figure as published: "
        value = guarantee_words(guarantee).value
        if first.get("epsilon") is None:  # of all runs together; this one's own stands in the words
            claim, value = "", value[0].upper() + value[1:]
        lines.insert(0, f"{claim}{value}.\n")
    own = guarantee.get("insecure_seed")
    if own or guarantee_words(guarantee).insecure:
        who = "Trained" if own else "Another run on these people was trained"
        lines.insert(0, f"**{who} with a known seed: the noise hides nothing. For tests only.**\n")
    return lines


def _rows(guarantee: dict[str, Any]) -> list[tuple[str, Any]]:
    """Everything that says something, each with its name."""
    rows = [(name, guarantee.get(name)) for name in _ABOUT_THE_STEPS]
    if guarantee.get("epsilon") is not None:
        rows.append(("arithmetic", guarantee.get("arithmetic") or "not recorded"))
    rows += [*_noise(guarantee), *((name, guarantee.get(name)) for name in _ABOUT_THE_PROMISE)]
    return [(name, value) for name, value in rows if value not in (None, [], "")]


def _noise(guarantee: dict[str, Any]) -> list[tuple[str, Any]]:
    """How much noise there was; of an adaptive run the mode too, and where the weights are from."""
    adaptive, least = guarantee.get("adaptive"), guarantee.get("noise_multiplier")
    noise = [("noise_multiplier", least)]
    if not adaptive:
        return noise
    if adaptive["mode"] != "clip":
        noise = [
            ("full noise_multiplier", adaptive["noise_multiplier"]),
            ("least noise_multiplier", least),
        ]
    weights = adaptive.get("weights") or {}
    origin = ", ".join(str(weights[name]) for name in _ABOUT_THE_WEIGHTS if weights.get(name))
    own = [(name, adaptive.get(name)) for name in _ABOUT_THE_MODE]
    return [("adaptive", adaptive["mode"]), *noise, *own, ("weights", origin)]


def _cell(value: Any) -> str:
    words = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words.replace("|", "\\|")
