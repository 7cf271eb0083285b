"""How well the server's half tells the label from vectors as they would be released."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tightlip.representation.data import Examples
from tightlip.representation.extractors import Extractor
from tightlip.representation.guarantees import VectorMechanism
from tightlip.representation.halves import Classifier
from tightlip.representation.release import normalised, training_noise
from tightlip.representation.words import masked_texts

# Of one draw of strong noise, the loss says more about the draw than about the weights.
NUM_DRAWS = 4
_SCORING = 2  # what a seed's stream is for; training uses 0 and 1


@dataclass(frozen=True)
class Scores:
    """Mean loss and accuracy, and of each text the share of draws in which it was told right."""

    loss_nats: float
    accuracy: float
    share_right: np.ndarray


@torch.no_grad()
def scores_of(
    extractor: Extractor,
    classifier: Classifier,
    mechanism: VectorMechanism,
    examples: Examples,
    *,
    seed: int,
) -> Scores:
    """Scores over a few draws of masks and noise, the same at every call with one seed."""
    device = classifier.center.device
    was_training = classifier.training
    classifier.eval()
    truth = torch.from_numpy(examples.label_ids).to(device)
    losses, right = [], []
    raw = None
    num_draws = NUM_DRAWS if mechanism.noise_scale or mechanism.dropout else 1
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for draw in range(num_draws):
            if raw is None or mechanism.dropout:
                raw = _raw(extractor, examples.texts, mechanism.dropout, (seed, draw)).to(device)
            vectors = normalised(raw, mechanism)
            logits = classifier(vectors + training_noise(vectors, mechanism))
            losses.append(functional.cross_entropy(logits, truth).item())
            right.append((logits.argmax(dim=1) == truth).cpu().numpy())
    classifier.train(was_training)
    share_right = np.mean(right, axis=0)
    return Scores(float(np.mean(losses)), float(share_right.mean()), share_right)


def _raw(
    extractor: Extractor, texts: list[str], dropout: float, stream: tuple[int, int]
) -> torch.Tensor:
    texts = masked_texts(
        texts,
        mask_word=extractor.mask_word,
        dropout=dropout,
        generator=np.random.default_rng([_SCORING, *stream]),
    )
    return torch.from_numpy(extractor.encode(texts, batch_size=64))
