"""Private vectors against the bare encoder: what masking, normalising and noise add to encoding.

    python benchmarks/representation.py ENCODER [--device cpu|cuda] [--texts 512] [--batch-size 32]

ENCODER is a Hugging Face folder, all-MiniLM-L6-v2 for instance. Both sides read the same texts in
the same batches; the bare one stops at the raw vectors. They take turns, and the median of the
ratios of neighbouring turns is told, since other work on the machine slows both alike.
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

from tightlip.representation.device import Device
from tightlip.representation.extractors import make_extractor
from tightlip.representation.guarantees import VectorMechanism

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
    print(f"{'encode':24}{'ms a text':>12}{'bare':>10}{'ratio':>8}{'least':>8}{'most':>8}{'of cores':>10}")  # fmt: skip
    for name, setting in SETTINGS.items():
        mechanism = VectorMechanism(dimensions=extractor.dimensions, **setting)
        device = Device(extractor, mechanism, mask_word=extractor.mask_word, pair="benchmark")
        # Masked words are other tokens, so the bare encoder reads texts masked beforehand.
        read = [half_masked(text, extractor) for text in texts] if mechanism.dropout else texts
        for encoder in (device, extractor):  # kernels are chosen and threads started
            spent(encoder, texts[:64], given)
        turns = [
            (spent(device, texts, given), spent(extractor, read, given))
            for _ in range(chosen.turns)
        ]
        private, bare = (statistics.median(side[0] for side in sides) / len(texts) * 1e3 for sides in zip(*turns, strict=True))  # fmt: skip
        ratios = sorted(ours[0] / theirs[0] for ours, theirs in turns)
        cores = statistics.median(ours[1] / theirs[1] for ours, theirs in turns)
        print(f"{name:24}{private:>12.3f}{bare:>10.3f}{statistics.median(ratios):>8.3f}{ratios[0]:>8.3f}{ratios[-1]:>8.3f}{cores:>10.3f}")  # fmt: skip


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
