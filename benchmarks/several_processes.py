"""Private over plain step time where several processes train one model.

    python benchmarks/several_processes.py [--device cpu|cuda] [--processes 1 2 4 8] [--sharded] [--repeats N]

Every process has as many rows as one would have alone, so that a perfect machine takes the same time
for all numbers of processes. Plain is torch as everyone uses it: DDP, or FSDP2 with --sharded, autograd
and fused Adam, as many rows each. Private is the engine's whole step: the draw, the ledger, clipping,
sums to their owners, noise, what is released to all, Adam. Beside one process stands the bare engine,
which knows of no others; both take turns. Every text is in every draw, so that all steps are alike.
Medians, in milliseconds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tightlip.models.configurations import TransformerConfig
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy.private_training import PrivateTraining

# Layers, hidden size, heads, vocabulary, rows of a process, positions.
SHAPES = {"cuda": (12, 768, 12, 50_257, 32, 256), "cpu": (2, 128, 4, 2_000, 8, 64)}
PROCESSES = (1, 2, 4, 8)


class Bench:
    """One process of several: its model, its rows, and the steps that are timed."""

    def __init__(self, device, repeats, sharded):
        self.size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        self.repeats, self.sharded = repeats, sharded
        self.device = torch.device(f"cuda:{rank}" if device == "cuda" else "cpu")
        self.bf16 = device == "cuda"
        if self.bf16:
            torch.cuda.set_device(self.device)
        self.shape = SHAPES[device]
        *_, self.vocabulary, self.rows, self.width = self.shape
        draw = torch.Generator().manual_seed(0)
        size = (self.rows * self.size, self.width + 1)
        self.texts = torch.randint(4, self.vocabulary, size, generator=draw)

    def model(self):
        layers, size, heads, *_ = self.shape
        torch.manual_seed(0)
        config = TransformerConfig(
            vocab_size=self.vocabulary, hidden_size=size, num_layers=layers, num_heads=heads,
            max_position_embeddings=1024, dropout=0.0,
        )  # fmt: skip
        return TransformerForCausalLM(config).to(self.device).train()

    def spread(self, model):
        """Sharded, layer by layer, where that is asked for."""
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            blocks = max(
                (each for each in model.modules() if isinstance(each, torch.nn.ModuleList)), key=len
            )
            for block in blocks:
                fully_shard(block)
            fully_shard(model)
        return model

    def plain(self):
        model = self.spread(self.model())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        run = model if self.sharded else DistributedDataParallel(model)
        ids, targets = (each.to(self.device) for each in self._own_rows())

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                logits = run(ids, use_cache=False).logits
            cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
            optimizer.step()

        return step

    def _own_rows(self):
        first = distributed.get_rank() * self.rows
        own = self.texts[first : first + self.rows]
        return own[:, :-1], own[:, 1:]

    def private(self, folder, spreads=True):
        model = self.spread(self.model()) if spreads else self.model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        engine = PrivateTraining(
            model, optimizer, list(self.texts), ledger=Path(folder) / "ledger.json", noise_multiplier=50.0,
            expected_batch=self.rows * self.size, steps=10_000, bf16=self.bf16, widths=(self.width,),
            physical_rows=self.rows,
        )  # fmt: skip
        return engine.step

    def timed(self, *steps):
        """Median milliseconds of each, taking turns."""
        for step in steps * 3:
            step()
        times = [[] for _ in steps]
        for _ in range(self.repeats):
            for step, own in zip(steps, times, strict=True):
                self._wait()
                start = time.perf_counter()
                step()
                self._wait()
                own.append(1e3 * (time.perf_counter() - start))
        return [statistics.median(own) for own in times]

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(device, repeats, sharded):
    """What one process finds; the first one prints it."""
    bench = Bench(device, repeats, sharded)
    with tempfile.TemporaryDirectory() as folder:
        # Before there is a group: this one knows of no others.
        bare = [bench.private(f"{folder}/bare", spreads=False)] if bench.size == 1 else []
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        private, *without = bench.timed(bench.private(f"{folder}/private"), *bare)
        (plain,) = bench.timed(bench.plain())
        found = {"plain": plain, "private": private, "bare": without[0] if without else None}
        if distributed.get_rank() == 0:
            print(json.dumps(found), flush=True)
        distributed.destroy_process_group()


def launched(number, arguments):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(number), __file__, "--measures", *arguments),
    ]
    threads = max(1, (os.cpu_count() or 1) // number)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SHAPES, default="cuda" if has_gpu else "cpu")
    parser.add_argument("--processes", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sharded", action="store_true", help="FSDP2 in the place of DDP")
    parser.add_argument("--measures", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measures:
        measure(args.device, args.repeats, args.sharded)
        return
    most = torch.cuda.device_count() if args.device == "cuda" else os.cpu_count()
    numbers = args.processes or [each for each in PROCESSES if each <= most]
    where = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU"
    layers, size, _, _, rows, width = SHAPES[args.device]
    how = "FSDP2" if args.sharded else "DDP"
    print(f"Transformer {layers}×{size}, {rows}×{width} on each process, {how}, {where}, torch {torch.__version__}\n")  # fmt: skip
    print(
        "| processes | plain, ms | private, ms | private / plain | bare engine, ms | private / bare |"
    )
    print("|---" * 6 + "|")
    given = ["--device", args.device, "--repeats", str(args.repeats)]
    for number in numbers:
        found = launched(number, given + ["--sharded"] * args.sharded)
        plain, private, bare = found["plain"], found["private"], found["bare"]
        beside = f"{bare:.2f} | {private / bare:.3f}" if bare else " | "
        print(f"| {number} | {plain:.2f} | {private:.2f} | {private / plain:.2f} | {beside} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
