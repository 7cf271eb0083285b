"""How well a model knows each check canary, asked as anybody with its probabilities could ask.

Shapes: M canaries, B of them at a time, T positions, V vocabulary.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tightlip.core.canary_key import CanaryKey, read_key
from tightlip.core.errors import UsageError
from tightlip.models.loading import load_causal_lm, load_tokenizer

LOGITS_AT_ONCE = 1 << 24


@torch.inference_mode()
def scores_of(model_folder: Path, key_file: Path, device: str | torch.device = "cpu") -> np.ndarray:
    """Minus each canary's mean loss in nats, read as training read it: behind a BOS if there is one."""
    key = read_key(key_file)
    model = load_causal_lm(model_folder, device=device, dtype=torch.float32)
    ids_MT = _ids(key, load_tokenizer(model_folder).bos_token_id).to(device)
    vocabulary = model.config.get_text_config().vocab_size
    together = max(1, LOGITS_AT_ONCE // (ids_MT.shape[1] * vocabulary))
    parts = []
    for ids_BT in ids_MT.split(together):
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits.float()
        known_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]
        parts.append(known_BT.double().mean(1))
    scores = torch.cat(parts).cpu().numpy()
    if not np.isfinite(scores).all():
        raise UsageError(
            f"{model_folder} gives losses that are no numbers, so no guess can be made. Train again."
        )
    return scores


def _ids(key: CanaryKey, bos: int | None) -> Tensor:
    ids_MT = torch.from_numpy(key.tokens_ML)
    return ids_MT if bos is None else torch.nn.functional.pad(ids_MT, (1, 0), value=bos)
