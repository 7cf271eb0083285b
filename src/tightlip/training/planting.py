"""What the texts of the one-run check read. Whatever they are, nobody's text decides on it: they are
trained on, and words chosen because the corpus lacks them would tell what it has.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tightlip.core.errors import UsageError
from tightlip.models.loading import read_configuration
from tightlip.training.config import BUILT_IN_MODELS, TrainConfig
from tightlip.training.starting import starting_model

CHECK_KINDS = ("random", "rare", "new", "sampled")
TEMPERATURE = 2.0  # high: what the model would hardly ever say by itself
_RARE_SHARE, _FEWEST = 0.1, 50
_AT_ONCE = 256
Draw = Callable[[tuple[int, int], np.random.Generator], np.ndarray]


def drawn_tokens(kind: str, config: TrainConfig, tokenizer: Any) -> Draw:
    """Draws texts of a kind, so many of so many tokens."""
    special = set(tokenizer.all_special_ids)
    plain = np.setdiff1d(np.arange(len(tokenizer)), list(special))
    if kind == "sampled":
        return _samples(config, tokenizer, sorted(special))
    if kind == "rare":  # vocabularies begin with what is frequent, by count or by merge
        plain = plain[-max(_FEWEST, int(len(plain) * _RARE_SHARE)) :]
    if kind == "new":
        plain = _never_spelt(config, tokenizer)
    return uniform(plain, len(tokenizer))


def uniform(allowed: np.ndarray, vocabulary_size: int) -> Draw:
    if len(allowed) < 2:
        raise UsageError(
            f"A vocabulary of {vocabulary_size} leaves {len(allowed)} words for canaries, which would all read alike. "
            "Give a corpus with more words."
        )
    return lambda shape, generator: generator.choice(allowed, shape)


def _never_spelt(config: TrainConfig, tokenizer: Any) -> np.ndarray:
    """Entries that no text is ever cut into: special ones without a part in training, and rows of the
    model's vocabulary beyond the tokenizer's."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    used = {getattr(tokenizer, name) for name in names}
    own = len(tokenizer)
    if config.model not in BUILT_IN_MODELS:
        own = int(read_configuration(Path(config.model)).get_text_config().vocab_size)
    beyond = range(len(tokenizer), own)
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - used
    found = np.array(sorted({*added, *beyond}), np.int64)
    if len(found) < 2:
        raise UsageError(
            f"dp_check_kind='new' needs entries of the vocabulary that no text is cut into, and {config.model} has {len(found)}. "
            "Use --dp-check-kind rare."
        )
    return found


def _samples(config: TrainConfig, tokenizer: Any, special: list[int]) -> Draw:
    if config.model in BUILT_IN_MODELS:
        raise UsageError(
            f"dp_check_kind='sampled' lets the model to start from write them, and a new {config.model} knows nothing yet. Use "
            "--dp-check-kind rare, or give --model DIR."
        )

    @torch.inference_mode()
    def draw(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
        model = starting_model(config, tokenizer, "cpu").eval()
        begin = tokenizer.bos_token_id
        firsts = np.setdiff1d(np.arange(len(tokenizer)), special)
        parts = []
        for start in range(0, shape[0], _AT_ONCE):
            num = min(_AT_ONCE, shape[0] - start)
            first = np.full((num, 1), begin) if begin is not None else generator.choice(firsts, (num, 1))  # fmt: skip
            ids_BT = torch.from_numpy(first)
            while ids_BT.shape[1] < shape[1] + (begin is not None):
                logits_BV = model(input_ids=ids_BT, use_cache=False).logits[:, -1].double()
                logits_BV[:, special], logits_BV[:, len(tokenizer) :] = -torch.inf, -torch.inf
                # The highest of logits and Gumbel noise is a sample; the noise is the generator's.
                noise = torch.from_numpy(generator.gumbel(size=tuple(logits_BV.shape)))
                chosen_B1 = (logits_BV / TEMPERATURE + noise).argmax(1, keepdim=True)
                ids_BT = torch.cat([ids_BT, chosen_B1], 1)
            parts.append(ids_BT[:, int(begin is not None) :].numpy())
        return np.concatenate(parts)

    return draw
