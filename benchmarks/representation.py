"""Private vectors against the bare encoder: what masking, normalising and noise add to encoding.

    python benchmarks/representation.py ENCODER [--device cpu|cuda] [--texts 512] [--batch-size 32]

ENCODER is a Hugging Face folder, all-MiniLM-L6-v2 for instance. Both sides read the same texts in
the same batches. The bare one is a loop as anybody would write it: tokenise a batch, run the model,
pool, fetch the raw vectors. Ours tokenises and draws noise on threads while the model works, which
on a GPU can save more than the noise costs; "no noise" is our own extractor alone, to tell the two
apart. They take turns, and the median of the ratios of neighbouring turns is told, since other work
on the machine slows all alike.
"""

import argparse
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command sets it

import numpy as np
import torch

from tightlip.vectors.encode import Device
from tightlip.vectors.extractors import make_extractor
from tightlip.vectors.guarantees import VectorMechanism

WORDS = ["the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "with", "be", "by"]
SETTINGS = {
    "laplace": {"mechanism": "laplace-as-published", "epsilon": 0.05},
    "laplace, half masked": {"mechanism": "laplace-as-published", "epsilon": 0.05, "dropout": 0.5},
    "gaussian": {"mechanism": "gaussian", "epsilon": 4.0},
}


def texts_of(count: int, least: int = 8, most: int = 60) -> list[str]:
    """Made-up sentences of ordinary words, as long as reviews and headlines are."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(least, most, count).tolist()
    return [" ".join(draw.choice(WORDS, size)) for size in sizes]


def tokenised(extractor, texts: list[str]):
    """A batch of texts as the model takes it."""
    limits = {"truncation": True, "max_length": extractor.max_tokens}
    return extractor.tokenizer(texts, padding=True, return_tensors="pt", **limits)


def pooled(extractor, tokens) -> torch.Tensor:
    """A plain forward pass, then the first token or the mean of all."""
    hidden = extractor.model(**tokens).last_hidden_state
    if extractor.pooling == "cls":
        return hidden[:, 0]
    real = tokens["attention_mask"][..., None]
    return (hidden * real).sum(dim=1) / real.sum(dim=1)


class Bare:
    """The encoder by itself; which texts share a batch is given to it."""

    def __init__(self, extractor, texts: list[str], batch_size: int) -> None:
        self.extractor = extractor
        self.batches = [places for places, _ in extractor.batches(texts, batch_size)]

    @torch.inference_mode()
    def encode(self, texts: list[str], *, batch_size: int, device: str) -> np.ndarray:
        found = np.empty((len(texts), self.extractor.dimensions), np.float32)
        for places in self.batches:
            tokens = tokenised(self.extractor, [texts[place] for place in places])
            found[places] = pooled(self.extractor, tokens.to(device)).cpu().numpy()
        return found


def spent(encoder, texts: list[str], given: dict) -> tuple[float, float]:
    """Seconds on the clock and of all cores together, for one pass over the texts."""
    clock, cores = time.perf_counter(), time.process_time()
    encoder.encode(texts, **given)
    if given["device"] != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - clock, time.process_time() - cores


def encoding(chosen: argparse.Namespace) -> None:
    """Print what each mechanism costs beside the bare encoder."""
    extractor = make_extractor(chosen.encoder, []).eval().to(chosen.device)
    texts = texts_of(chosen.texts)
    given = {"batch_size": chosen.batch_size, "device": chosen.device}
    print(f"{'encode':24}{'ms a text':>12}{'bare':>10}{'ratio':>8}{'least':>8}{'most':>8}{'no noise':>10}{'of cores':>10}")  # fmt: skip
    for name, setting in SETTINGS.items():
        mechanism = VectorMechanism(dimensions=extractor.dimensions, **setting)
        device = Device(extractor, mechanism, mask_word=extractor.mask_word, pair="benchmark")
        # Masked words are other tokens, so the bare encoder reads texts masked beforehand.
        read = [half_masked(text, extractor) for text in texts] if mechanism.dropout else texts
        sides = ((device, texts), (Bare(extractor, texts, chosen.batch_size), read), (extractor, read))  # fmt: skip
        for encoder, given_texts in sides:  # kernels are chosen and threads started
            spent(encoder, given_texts, given)
        turns = [
            [spent(encoder, given_texts, given) for encoder, given_texts in sides]
            for _ in range(chosen.turns)
        ]
        private, bare = (statistics.median(turn[side][0] for turn in turns) / len(texts) * 1e3 for side in (0, 1))  # fmt: skip
        ratios = sorted(ours[0] / theirs[0] for ours, theirs, _ in turns)
        by_noise = statistics.median(ours[0] / without[0] for ours, _, without in turns)
        cores = statistics.median(ours[1] / theirs[1] for ours, theirs, _ in turns)
        print(f"{name:24}{private:>12.3f}{bare:>10.3f}{statistics.median(ratios):>8.3f}{ratios[0]:>8.3f}{ratios[-1]:>8.3f}{by_noise:>10.3f}{cores:>10.3f}")  # fmt: skip


def half_masked(text: str, extractor) -> str:
    return " ".join(
        extractor.mask_word if place % 2 else word for place, word in enumerate(text.split())
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("encoder", type=Path)
    options.add_argument("--device", default="cpu")
    options.add_argument("--texts", type=int, default=512)
    options.add_argument("--batch-size", type=int, default=32)
    options.add_argument("--turns", type=int, default=7)
    chosen = options.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {chosen.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {chosen.encoder.name}, {chosen.texts} texts"
    )
    encoding(chosen)


if __name__ == "__main__":
    main()
