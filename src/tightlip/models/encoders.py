"""Loading any text encoder from a folder, or saying why not; nothing in it is ever executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from tightlip.core.errors import UsageError
from tightlip.models.loading import (
    FROM_THE_FOLDER_ONLY,
    check_all_weights_came,
    check_folder,
    check_no_foreign_code,
    check_weight_files,
    read_config,
    usage_errors,
    without_progress_bar,
)
from tightlip.models.registration import register_configurations

# Made for another task than ours and never asked; many a checkpoint comes without it.
UNUSED_PART = "pooler"


def load_encoder(folder: Path | str) -> PreTrainedModel:
    """The encoder in `folder` in float32 and evaluation mode, without its pooling head.

    Holds:
        nothing_executed: code and pickles in the folder are never run.
        nothing_made_up: a weight missing from the checkpoint is a usage error.
        one_vector_a_token: what gives no hidden state per token is a usage error.
    """
    folder = Path(folder)
    register_configurations()
    check_folder(folder)
    check_no_foreign_code(folder, read_config(folder))
    with usage_errors(folder):
        config = AutoConfig.from_pretrained(str(folder), **FROM_THE_FOLDER_ONLY)
    if config.is_encoder_decoder:
        raise UsageError(
            f"{folder} holds a '{config.model_type}' model, half of which writes text. Give an encoder such as BERT, "
            "RoBERTa or MiniLM."
        )
    check_weight_files(folder)
    with without_progress_bar(), without_warnings(), usage_errors(folder):
        model, info = AutoModel.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported below, with the missing ones
            output_loading_info=True,
            **FROM_THE_FOLDER_ONLY,
        )
    check_all_weights_came(folder, without_the_unused(info))
    if getattr(model, UNUSED_PART, None) is not None:
        setattr(model, UNUSED_PART, None)
    check_hidden_states(folder, model)
    return model.eval()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep transformers from reporting at length on weights that are checked here, or not used."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def without_the_unused(info: dict[str, Any]) -> dict[str, Any]:
    unused = f"{UNUSED_PART}."
    missing = [key for key in info["missing_keys"] if not key.startswith(unused)]
    mismatched = [entry for entry in info["mismatched_keys"] if not entry[0].startswith(unused)]
    return {"missing_keys": missing, "mismatched_keys": mismatched}


def check_hidden_states(folder: Path, model: PreTrainedModel) -> None:
    """Ask the model itself: configurations do not tell what comes out."""
    ids = torch.ones(1, 3, dtype=torch.int64)
    with torch.inference_mode(), usage_errors(folder):
        found = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    hidden = getattr(found, "last_hidden_state", None)
    if hidden is None or hidden.shape[:2] != ids.shape:
        raise UsageError(
            f"{folder} holds a '{model.config.model_type}' model that gives no vector for each token. Give an encoder "
            "such as BERT, RoBERTa or MiniLM."
        )


def most_tokens(model: PreTrainedModel) -> int | None:
    """How long a row the model has positions for; None where any length will do."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    # RoBERTa counts its positions from behind the padding's own.
    padding = getattr(table, "padding_idx", None)
    return positions if padding is None else positions - padding - 1
