"""Training through noise against plain fine-tuning: the same encoder, texts and batches.

    python benchmarks/representation_training.py ENCODER [--device cpu|cuda] [--steps 20] [--bf16]

ENCODER is a Hugging Face folder, all-MiniLM-L6-v2 for instance. The plain side is a loop of its own,
as anybody would write it: tokenise the batch, encoder, mean or first token, dropout, a linear
layer, AdamW. Ours draws masks and noise, and makes its batches on a thread while a step runs. They
take turns step by step, and the median of the ratios of neighbouring steps is told; under "ready",
the same where the plain side's time to tokenise is not counted.
"""

import argparse
import copy
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command sets it

import torch
from torch import nn
from torch.nn import functional

from representation import pooled, texts_of, tokenised
from tightlip.vectors.data import open_source, read_examples
from tightlip.vectors.learning import LARGEST_NORM, Training
from tightlip.vectors.settings import RepresentOptions, RepresentSettings

SETTINGS = {
    "no noise": {"method": "none"},
    "gaussian": {"epsilon": 8.0},
    "laplace": {"epsilon": 0.05, "mechanism": "laplace-as-published"},
    "gaussian, half masked": {"epsilon": 8.0, "dropout": 0.5},
}


class Plain:
    """Fine-tuning as anybody would write it."""

    def __init__(self, training: Training, *, bf16: bool) -> None:
        self.extractor = copy.deepcopy(training.extractor).train()
        self.texts, self.tokenising = training.train.texts, 0.0
        num_labels = len(training.examples.labels)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(self.extractor.dimensions, num_labels))
        self.device, self.bf16 = training.device, bf16
        self.head.to(self.device)
        self.parameters = [*self.extractor.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-5, fused=True)
        self.truth = training.truth

    def take_step(self, places) -> None:
        clock = time.perf_counter()
        tokens = tokenised(self.extractor, [self.texts[place] for place in places])
        self.tokenising = time.perf_counter() - clock
        truth = self.truth[torch.from_numpy(places).to(self.device)]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            vectors = pooled(self.extractor, tokens.to(self.device)).float()
        loss = functional.cross_entropy(self.head(vectors), truth)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)
        self.optimizer.step()


def spent(step, device: torch.device) -> tuple[float, float]:
    """Seconds on the clock and of all cores together."""
    clock, cores = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - clock, time.process_time() - cores


def compared(setting: dict, chosen: argparse.Namespace, out: Path) -> list[tuple]:
    """Each step of ours and of the plain loop on the same tokens, in turn."""
    texts = texts_of(chosen.steps * chosen.batch_size * 2)
    rows = [
        {"text": f"{text} {n}", "topic": "even" if n % 2 else "odd"} for n, text in enumerate(texts)
    ]
    settings = RepresentSettings(
        label="topic", extractor=str(chosen.encoder), batch_size=chosen.batch_size, **setting
    )
    options = RepresentOptions(device=chosen.device, bf16=chosen.bf16)
    training = Training(read_examples(open_source(rows), settings), settings, options, out)
    plain = Plain(training, bf16=chosen.bf16)
    batches = training.batches.from_step(0, chosen.steps + 4)
    turns = []
    for _ in range(chosen.steps + 3):
        made = []

        def ours(made=made) -> None:
            made.append(next(batches))
            training.take_step(made[0])

        mine = spent(ours, training.device)
        theirs = spent(lambda made=made: plain.take_step(made[0].places.numpy()), training.device)
        turns.append((mine, theirs, plain.tokenising))
    return turns[3:]  # kernels are chosen and threads started in the first


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("encoder", type=Path)
    options.add_argument("--device", default="cpu")
    options.add_argument("--batch-size", type=int, default=32)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--bf16", action="store_true")
    chosen = options.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {chosen.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {chosen.encoder.name}, batches of {chosen.batch_size}"
    )
    print(f"{'train':24}{'ms a step':>12}{'plain':>10}{'ratio':>8}{'ready':>8}{'of cores':>10}")
    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            turns = compared(setting, chosen, Path(folder))
        ours, plain = (statistics.median(turn[side][0] for turn in turns) * 1e3 for side in (0, 1))
        clock, cores = (statistics.median(a[i] / b[i] for a, b, _ in turns) for i in (0, 1))
        ready = statistics.median(a[0] / (b[0] - tokenising) for a, b, tokenising in turns)
        print(f"{name:24}{ours:>12.1f}{plain:>10.1f}{clock:>8.3f}{ready:>8.3f}{cores:>10.3f}")


if __name__ == "__main__":
    main()
