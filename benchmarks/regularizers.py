"""A step with a privacy regulariser against a plain one of the same model on the same rows.

    python benchmarks/regularizers.py [--device cuda|cpu] [--users 100] [--rounds 7]

Whole steps as `tightlip train` takes them: rows gathered, gradients, optimizer, discriminator,
second batch. Plain is our own best step; beside it torch's usual one (cuDNN for recurrent
layers), and each regulariser without our captured graph. Rounds of all take turns; medians.
"""

import argparse
import gc
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.training.batches import rows_of
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.losses import Forward
from tightlip.training.mitigations import CorpusFacts, RunContext
from tightlip.training.mitigations.adversarial import AdversarialMitigation
from tightlip.training.mitigations.none import NoMitigation
from tightlip.training.mitigations.triplet import TripletMitigation
from tightlip.training.plan import build_optimizer

SHAPES = {  # vocabulary, size, layers, rows, positions, steps of a round
    "cuda": (40_000, 550, 2, 100, 64, 20),
    "cpu": (4_000, 128, 2, 16, 32, 10),
}
INSIDE = {"triplet_pairs": "inside", "batching": "uniform"}
METHODS = {  # name: mitigation, settings, whether ours rather than torch's layers
    "plain, ours": (NoMitigation, {}, True),
    "plain, torch": (NoMitigation, {}, False),
    "adversarial, ours": (AdversarialMitigation, {"mitigation": "adversarial"}, True),
    "adversarial, torch": (AdversarialMitigation, {"mitigation": "adversarial"}, False),
    "triplet, auxiliary, ours": (TripletMitigation, {"mitigation": "triplet"}, True),
    "triplet, auxiliary, torch": (TripletMitigation, {"mitigation": "triplet"}, False),
    "triplet, inside, ours": (TripletMitigation, {"mitigation": "triplet", **INSIDE}, True),
    "triplet, inside, torch": (TripletMitigation, {"mitigation": "triplet", **INSIDE}, False),
}


def corpus_of(num_users, rows_per_user, positions, vocabulary, *, shortest=None):
    """Every document fills one row, so that no method pads; or takes from `shortest` on."""
    num = num_users * rows_per_user
    draw = np.random.default_rng(0)
    bounds = np.cumsum([0, *draw.integers(shortest or positions, positions + 1, num)])
    return TokenizedCorpus(
        tokens=draw.integers(4, vocabulary, bounds[-1]).astype(np.int32),
        bounds=bounds,
        users=np.repeat(np.arange(num_users), rows_per_user).astype(np.int32),
        user_names=[f"user {number}" for number in range(num_users)],
        corpus_fingerprint="",
        tokenizer_fingerprint="",
    )


class Method:
    """One way to train, ready to take steps."""

    def __init__(self, name, shape, device, bf16, num_users, *, shortest=None):
        vocabulary, size, layers, batch_size, positions, self.round = shape
        kind, settings, ours = METHODS[name]
        torch.manual_seed(0)
        model = LSTMForCausalLM(
            LSTMConfig(
                vocab_size=vocabulary, embedding_size=size, hidden_size=size, num_layers=layers
            )
        ).to(device)
        self.model = model
        config = TrainConfig.of(batch_size=batch_size, sequence_length=positions, **settings)
        rows = rows_of(
            corpus_of(num_users, batch_size, positions, vocabulary, shortest=shortest),
            sequence_length=positions, bos=1, pad=0,
        )  # fmt: skip
        options = RunOptions(bf16=bf16)
        self.mitigation, self.number, self.times = kind(), 0, []
        self.mitigation.prepare(
            RunContext(
                model=model,
                forward=Forward(model, bf16=bf16),
                optimizer=build_optimizer(model, config),
                rows=rows, config=config, options=options, device=torch.device(device),
                folder=Path(), corpus=CorpusFacts(text_fingerprint="", name=""),
                steps_per_epoch=self.mitigation.steps_per_epoch(rows, config), num_steps=1 << 40,
            )
        )  # fmt: skip
        if not ours:
            self.mitigation.passes = self.mitigation.states = None

    def take_round(self):
        wait()
        start = time.perf_counter()
        for _ in range(self.round):
            self.mitigation.step(self.number)
            self.number += 1
        wait()
        self.times.append((time.perf_counter() - start) / self.round)


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ready(name, *settings, device):
    """A method after its first round, captured and with its kernels chosen, and what it holds."""
    if device == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    method = Method(name, *settings)
    method.take_round()
    method.times.clear()
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return method, f"{peak / 2**30:8.2f} GiB" if device == "cuda" else ""


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--users", type=int, default=100)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--only", nargs="*", default=list(METHODS))
    chosen = options.parse_args()
    torch.set_float32_matmul_precision("high")
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.machine()
    vocabulary, size, layers, rows, positions, _ = SHAPES[chosen.device]
    print(
        f"{where}; torch {torch.__version__}; LSTM {layers}×{size}, {vocabulary:,} words, ", end=""
    )
    print(f"{rows}×{positions}, {chosen.users} users")
    for bf16 in (False, True) if chosen.device == "cuda" else (False,):
        shape = SHAPES[chosen.device]
        methods = {
            name: ready(name, shape, chosen.device, bf16, chosen.users, device=chosen.device)
            for name in chosen.only
        }
        for _ in range(chosen.rounds):
            for method, _ in methods.values():
                method.take_round()
        print("bf16" if bf16 else "tf32" if chosen.device == "cuda" else "float32")
        plain = statistics.median(methods["plain, ours"][0].times)
        for name, (method, peak) in methods.items():
            median = statistics.median(method.times)
            print(f"  {name:28}{median * 1e3:9.2f} ms {median / plain:7.3f}× {peak}", flush=True)
        methods.clear()
        gc.collect()


if __name__ == "__main__":
    main()
