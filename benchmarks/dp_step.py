"""A private training step against plain training of the same model on the same tokens.

    python benchmarks/dp_step.py [--device cpu|cuda] [--only lstm gru gpt ...] [--write DOCS] [--adaptive]
        [--side-by-side]

Every step includes its optimizer (fused Adam) and, under DP, clipping and fresh noise. Plain is
our own best plain step; beside it, where they run, torch's usual one (cuDNN for recurrent
layers) and Opacus. Medians; ratios are to our best plain step in the same precision. *As drawn* is
the engine's whole step, Poisson draws padded to passes of a fixed size. With --write the table goes
into the docs, and a ratio more than 10% above the one there is printed as worse.

With --side-by-side settings are made ready in processes of their own, all at once; then one after the
other is timed.

With --adaptive: whole steps of the engine, draw and ledger included, the modes of adaptive DP
against plain DP, taking turns.
"""

import argparse
import datetime
import fcntl
import gc
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tightlip
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.models.configurations import GRUConfig, TransformerConfig
from tightlip.models.recurrent import GRUForCausalLM
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy.adaptive import AdaptiveSpec
from tightlip.privacy.clipping import Clip
from tightlip.privacy.layers import Layout
from tightlip.privacy.noise_schedules import noise_for
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.private_training import PrivateTraining
from tightlip.privacy.releasing import release
from tightlip.training.batches import Batch
from tightlip.training.losses import Forward


def recurrent(kind, vocabulary, size, layers):
    config, model = {"lstm": (LSTMConfig, LSTMForCausalLM), "gru": (GRUConfig, GRUForCausalLM)}[
        kind
    ]
    return model(
        config(vocab_size=vocabulary, embedding_size=size, hidden_size=size, num_layers=layers)
    )


def gpt(layers=12, size=768, vocabulary=50_257, heads=12, tied=False):
    return TransformerForCausalLM(
        TransformerConfig(
            vocab_size=vocabulary, hidden_size=size, num_layers=layers, num_heads=heads,
            max_position_embeddings=1024, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=12, max_position_embeddings=1024,
        )
    )  # fmt: skip


def with_lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt(), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


# name: (model, vocabulary, rows, positions, rows of a unit, ways: plain and private, precisions)
SETTINGS = {
    "cuda": {
        "lstm": ("LSTM 2×550, 40k, 100×64", lambda: recurrent("lstm", 40_000, 550, 2), 40_000, 100, 64, 1, "graph"),
        "lstm-user": ("LSTM 2×550, 40k, 32 users × 4 × 64", lambda: recurrent("lstm", 40_000, 550, 2), 40_000, 128, 64, 4, "graph"),
        "gru": ("GRU 1×512, 10k, 512×32", lambda: recurrent("gru", 10_000, 512, 1), 10_000, 512, 32, 1, "graph"),
        "gpt": ("GPT-2 small shape, 32×256", gpt, 50_257, 32, 256, 1, "compile"),
        "gpt-tied": ("GPT-2 small shape tied, 32×256", lambda: gpt(tied=True), 50_257, 32, 256, 1, "compile"),
        "llama": ("Llama shape, 32×256", llama, 32_000, 32, 256, 1, "compile"),
        "lora": ("GPT-2 small shape, LoRA 16, 32×256", with_lora, 50_257, 32, 256, 1, "compile"),
        "gpt-user": ("GPT-2 small shape, 32 users × 4 × 64", gpt, 50_257, 128, 64, 4, "compile"),
        "gpt-short": ("GPT-2 small shape, 64×128", gpt, 50_257, 64, 128, 1, "compile"),
    },
    "cpu": {
        "lstm": ("LSTM 2×128, 10k, 32×64", lambda: recurrent("lstm", 10_000, 128, 2), 10_000, 32, 64, 1, "eager"),
        "gpt": ("Transformer 4×128, 10k, 32×64", lambda: gpt(4, 128, 10_000, 4), 10_000, 32, 64, 1, "eager"),
    },
}  # fmt: skip


# What is run where nothing is asked for: a compiled setting takes two minutes.
USUAL = {
    "cuda": ("lstm", "lstm-user", "gpt", "llama", "lora", "start"),
    "cpu": tuple(SETTINGS["cpu"]),
}


TURNS = None  # the file that processes side by side lock


def turn(how):
    """Wait for the other settings' processes: many may get ready at a time, and one alone be timed."""
    if TURNS is not None:
        fcntl.flock(TURNS, how)


class Bench:
    """One setting: a model, a batch, and steps to be timed."""

    def __init__(self, device, setting, bf16, repeats):
        self.device, self.bf16, self.repeats = torch.device(device), bf16, repeats
        self.name, self.make, vocabulary, rows, width, self.per_unit, self.way = setting
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(4, vocabulary, (rows, width), generator=draw).to(device)
        self.targets = torch.randint(4, vocabulary, (rows, width), generator=draw).to(device)

    def model(self):
        torch.manual_seed(0)
        return self.make().to(self.device).train()

    def optimizer(self, model):
        trained = [each for each in model.parameters() if each.requires_grad]
        return torch.optim.Adam(trained, lr=1e-3, fused=True)

    def usual(self):
        """torch as everyone uses it: the model's own forward, autograd, Adam."""
        model = self.model()
        optimizer = self.optimizer(model)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                logits = model(self.ids, use_cache=False).logits
            cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten()).backward()
            optimizer.step()

        return self.ready(step)

    def plain(self):
        """What `tightlip train` does without a mitigation."""
        model = self.model()
        optimizer = self.optimizer(model)
        if self.way == "graph":
            return self.plain_pass("graph", model, optimizer)
        compiled = len(self.ids) if self.way == "compile" else None
        forward = Forward(model, bf16=self.bf16, compiled_rows=compiled)
        batch = Batch(
            input_ids_BT=torch.cat([self.ids, self.ids[:, :1]], 1),
            labels_BT=torch.cat([self.ids[:, :1], self.targets], 1),
            places_N=torch.arange(self.ids.numel(), device=self.device),
            target_ids_N=self.targets.flatten(),
            num_inputs_B=torch.full((len(self.ids),), self.ids.shape[1], device=self.device),
        )

        def step():
            forward.backward(batch, 1.0)
            optimizer.step()

        return self.ready(step)

    def plain_pass(self, way, model, optimizer):
        passes = Passes(model, None, way=way, bf16=self.bf16)
        batch = self.physical()

        def step():
            found = passes(batch)
            for name, parameter in passes.parameters.items():
                parameter.grad = found.gradients[name]
            optimizer.step()

        return self.ready(step)

    def private(self, exact=False):
        model = self.model()
        optimizer = self.optimizer(model)
        clip = Clip(norm=1.0, exact=exact)
        passes = Passes(model, clip, way=self.way, bf16=self.bf16)
        noise, batch = noise_for(self.device, None), self.physical()

        def step():
            release(
                list(passes(batch).gradients.values()),
                passes.parameters.values(),
                optimizer,
                noise,
                scale=1.0,
                share=1 / batch.layout.num_units,
                unit=clip.step,
            )

        return self.ready(step)

    def drawn(self):
        """The engine's own step: units drawn, padded to passes of a fixed size, charged and released."""
        model = self.model()
        num_units = len(self.ids) // self.per_unit
        draw = torch.Generator().manual_seed(1)
        documents = torch.randint(
            4, int(self.ids.max()), (10 * len(self.ids), self.ids.shape[1] + 1), generator=draw
        )
        users = np.arange(len(documents)) // self.per_unit if self.per_unit > 1 else None
        self.folder = tempfile.TemporaryDirectory()  # gone with the setting
        private = PrivateTraining(
            model, self.optimizer(model), list(documents), ledger=Path(self.folder.name) / "ledger.json",
            users=users, noise_multiplier=1.0, expected_batch=num_units, steps=10_000,
            rows_per_unit=self.per_unit, way=self.way, bf16=self.bf16, widths=(self.ids.shape[1],),
        )  # fmt: skip
        return self.ready(private.step)

    def physical(self):
        num_units = len(self.ids) // self.per_unit
        layout = Layout(num_units=num_units, rows_per_unit=self.per_unit)
        own = torch.full((num_units,), self.per_unit, device=self.device)
        return Physical.of(self.ids, self.targets, own, layout)

    def opacus(self):
        """Opacus 1.6's hooks; it has an LSTM of its own, written in Python."""
        from opacus import GradSampleModule
        from opacus.layers import DPLSTM
        from opacus.optimizers import DPOptimizer

        vocabulary, size = self.make().lm_head.weight.shape

        class LSTM(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(vocabulary, size)
                self.rnn = DPLSTM(size, size, num_layers=2, batch_first=True)
                self.head = nn.Linear(size, vocabulary)

            def forward(self, ids):
                return self.head(self.rnn(self.embedding(ids))[0])

        model = GradSampleModule(LSTM().to(self.device), batch_first=True, loss_reduction="mean")
        optimizer = DPOptimizer(
            torch.optim.Adam(model.parameters(), lr=1e-3), noise_multiplier=1.0, max_grad_norm=1.0,
            expected_batch_size=len(self.ids),
        )  # fmt: skip

        def step():
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(self.ids).flatten(0, 1), self.targets.flatten()).backward()
            optimizer.step()

        return self.ready(step, repeats=6)

    def ready(self, step, repeats=None):
        """The step, ready to be timed, with its peak GiB and the seconds until three were done."""
        on_gpu = self.device.type == "cuda"
        start = time.perf_counter()
        for _ in range(3):
            step()
            if on_gpu:
                torch.cuda.synchronize()
        first = time.perf_counter() - start
        # Capture and compilation are in it: what a graph holds is allocated while it is captured.
        peak = (torch.cuda.max_memory_allocated() - self.before) / 2**30 if on_gpu else math.nan
        return Ready(step, peak, first, repeats or self.repeats)


@dataclass
class Ready:
    step: Callable[[], None]
    peak: float
    first: float
    repeats: int

    def milliseconds(self):
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            self.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)


def prepared(bench, work):
    """What `work` makes ready, or why it cannot."""
    gc.collect()
    torch.compiler.reset()  # what was captured before stays as it is
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        bench.before = torch.cuda.memory_allocated()
    try:
        return work()
    except (RuntimeError, ImportError, NotImplementedError, AssertionError) as error:
        return str(error).splitlines()[0][:90]


def row(name, ready, base=None):
    """Time a contender and say it: milliseconds, peak GiB, seconds until it was ready."""
    if isinstance(ready, str):
        print(f"  {name:34} did not run: {ready}", flush=True)
        return None
    ms, peak = ready.milliseconds(), ready.peak
    ratio = "" if base is None else f"{ms / base[0]:6.2f}×"
    memory = "" if base is None or peak != peak else f"{peak / base[1]:6.2f}× memory"
    print(
        f"  {name:34} {ms:9.2f} ms {ratio:8} {peak:6.2f} GiB {memory:14} ready in {ready.first:.1f} s",
        flush=True,
    )
    return ms, peak, ready.first


# What a private step may take of our best plain one.
ASKED = {
    "LSTM 2×550, 40k, 100×64, bf16": 1.15,
    "LSTM 2×550, 40k, 100×64, tf32": 1.30,
    "LSTM 2×550, 40k, 32 users × 4 × 64, bf16": 1.20,
    "GPT-2 small shape, 32×256, bf16": 1.12,
    "Llama shape, 32×256, bf16": 1.12,
    "GPT-2 small shape, LoRA 16, 32×256, bf16": 1.15,
}


def compare(device, key, bf16, repeats):
    """One line of the table: the contenders of a setting, in one process."""
    setting = SETTINGS[device][key]
    bench = Bench(device, setting, bf16, repeats)
    precision = "bf16" if bf16 else ("tf32" if device == "cuda" else "float32")
    name = f"{setting[0]}, {precision}"
    print(name, flush=True)
    works = {"plain": ("plain, ours", bench.plain)}
    if bench.way == "graph":
        works["usual"] = ("plain, torch (cuDNN)", bench.usual)
    works["private"] = ("private, ours", bench.private)
    if key in ("lstm", "gpt"):
        works["exact"] = ("private, exact sums", lambda: bench.private(exact=True))
    if bench.way != "compile":
        works["drawn"] = ("private, as drawn and padded", bench.drawn)
    if key == "lstm" and not bf16:
        works["opacus"] = ("private, Opacus hooks", bench.opacus)
    # All side by side make everything ready first; then one after the other is timed.
    turn(fcntl.LOCK_SH)
    ready = {each: prepared(bench, work) for each, (_, work) in works.items()}
    turn(fcntl.LOCK_EX)
    found = {}
    for each, (about, _) in works.items():
        found[each] = row(about, ready[each], found.get("plain"))
    turn(fcntl.LOCK_UN)
    return name, found


def table(lines):
    """The lines in Markdown."""
    head = "| setting | plain, ours | torch's usual | private | asked | exact sums | as drawn | Opacus | memory | ready |"
    out = [head, "|---" * 10 + "|"]
    for name, found in lines:
        plain = found["plain"]

        def cell(kind, bold=False, found=found, plain=plain):
            if found.get(kind) is None or plain is None:
                return ""
            ratio = f"{found[kind][0] / plain[0]:.2f}×"
            return f"{found[kind][0]:.2f} ms, {f'**{ratio}**' if bold else ratio}"

        private, plain_ms = found.get("private"), "" if plain is None else f"{plain[0]:.2f} ms"
        both = plain is not None and private is not None
        memory = f"{private[1] / plain[1]:.2f}" if both and private[1] == private[1] else ""
        ready = "" if private is None else f"{private[2]:.0f} s"
        cells = [
            name,
            plain_ms,
            cell("usual"),
            cell("private", bold=True),
            f"{ASKED.get(name, '')}",
        ]
        cells += [cell("exact"), cell("drawn"), cell("opacus"), memory, ready]
        out.append("| " + " | ".join(cells) + " |")
    return out


def write(path, device, about, lines):
    """Put the table into the docs, between the marks of this device, and say what became worse; lines
    of settings that were not run stay."""
    text = path.read_text()
    start, end = (f"<!-- dp_step {device}: {where} -->\n" for where in ("begins", "ends"))
    before, _, rest = text.partition(start)
    old, _, after = rest.partition(end)
    known = {
        cells[1].strip(): float(found.group(1))
        for line in old.splitlines()
        if len(cells := line.split("|")) > 5 and (found := re.search(r"\*\*([\d.]+)×", cells[4]))
    }
    for name, found in lines:
        if name in known and found.get("private") and found["plain"]:
            ratio = found["private"][0] / found["plain"][0]
            if ratio > 1.1 * known[name]:
                print(f"WORSE: {name}: {ratio:.2f}, and the docs say {known[name]:.2f}")
    kept = [line for line in old.splitlines() if line.startswith("| ")][1:]
    new = {name: line for (name, _), line in zip(lines, table(lines)[2:], strict=True)}
    rows = [new.pop(line.split("|")[1].strip(), line) for line in kept] + list(new.values())
    rows = [*table([]), *rows]
    path.write_text("".join([before, start, about, "\n\n", "\n".join(rows), "\n", end, after]))


ADAPTIVE = ("dp", "clip", "scale", "as-published")


def adaptive(device, key, repeats):
    """Every document is in every step, so that all modes do the same work."""
    setting = SETTINGS[device][key]
    bench = Bench(device, setting, device == "cuda", repeats)
    model = bench.model()
    optimizer, weights = (
        bench.optimizer(model),
        np.random.default_rng(0).uniform(0.05, 1, len(bench.ids)),
    )

    def engine(mode, folder):
        more = {}
        if mode != "dp":
            more = {
                "adaptive": AdaptiveSpec(mode=mode, least_weight=0.05, least_clip=0.2),
                "weights": weights,
            }
        return PrivateTraining(
            model, optimizer, list(bench.ids.cpu()), ledger=Path(folder) / mode / "ledger.json",
            way=bench.way, bf16=bench.bf16, physical_rows=len(bench.ids), widths=(bench.ids.shape[1],),
            expected_batch=len(bench.ids), steps=10_000, clip_norm=1.0, noise_multiplier=50.0, delta=1e-3,
            **more,
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        engines = {mode: engine(mode, folder) for mode in ADAPTIVE}
        for each in engines.values():
            each._passes = engines["dp"]._passes  # compiled once
        times = taking_turns(engines, repeats, device == "cuda")
    print(f"{setting[0]}, {'bf16' if bench.bf16 else 'float32'}, {repeats} steps of each")
    for mode, own in times.items():
        ratios = sorted(a / b for a, b in zip(own, times["dp"], strict=True))
        print(
            f"  {mode:14} {statistics.median(own):9.3f} ms   {statistics.median(own) / statistics.median(times['dp']):.4f}× dp; "
            f"step by step {statistics.median(ratios):.4f} ({ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f})",
            flush=True,
        )


def taking_turns(engines, repeats, on_gpu):
    """Milliseconds of every step, in an order drawn anew for each round."""
    draw, times = np.random.default_rng(1), {mode: [] for mode in engines}
    for number in range(-4, repeats):
        for mode in draw.permutation(list(engines)):
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            engines[mode].step()
            if on_gpu:
                torch.cuda.synchronize()
            if number >= 0:
                times[mode].append(1e3 * (time.perf_counter() - start))
    return times


def start_up():
    """Seconds from the command to the end of a run of one step, LSTM 2×550, 40k words."""
    draw = np.random.default_rng(0)
    words = np.array([f"w{number:05d}" for number in range(40_000)])
    rows = [
        {"user": f"u{number % 500}", "text": " ".join(draw.choice(words, 64))}
        for number in range(4000)
    ]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        tightlip.prepare(rows, corpus, vocabulary_size=40_000, split="none")
        command = [
            sys.executable, "-m", "tightlip", "train", str(corpus), "--out", f"{folder}/run",
            "--mitigation", "dp", "--noise-multiplier", "1", "--unit", "example", "--steps", "1",
            "--batch-size", "100", "--embedding-size", "550", "--hidden-size", "550",
            "--sequence-length", "64", "--snapshot", "none", "--allow-unproved", "--bf16",
        ]  # fmt: skip
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
    print(f"tightlip train, one private step, everything from the command on: {seconds:.1f} s")
    if done.returncode:
        print(done.stderr[-1500:])


def compared(device, keys, repeats):
    lines = []
    for key in keys:
        if key == "start":
            turn(fcntl.LOCK_EX)
            start_up()
            turn(fcntl.LOCK_UN)
            continue
        graph = SETTINGS[device][key][-1] == "graph"
        for bf16 in [False, True] if graph else [device == "cuda"]:
            lines.append(compare(device, key, bf16, repeats))
    return lines


def side_by_side(device, keys, repeats):
    """The same, each setting in a process of its own; what they print is printed in order."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--device", device, "--repeats", str(repeats)]
        command += ["--turns", f"{folder}/turns", "--only"]
        parts = [
            subprocess.Popen([*command, key], stdout=subprocess.PIPE, text=True) for key in keys
        ]
        lines = []
        for part in parts:
            *printed, found = part.communicate()[0].splitlines()
            if part.returncode:
                raise SystemExit(f"{part.args[-1]} failed.")
            print("\n".join(printed[2:]), flush=True)
            lines += json.loads(found)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--write", type=Path, help="docs/benchmarks.md, whose table it replaces")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    machine = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{platform.processor() or 'CPU'}, {torch.get_num_threads()} threads"
    )
    print(f"{machine}; torch {torch.__version__}; medians of whole steps\n")
    repeats = options.repeats or (30 if options.device == "cuda" else 7)
    if options.adaptive:
        for key in options.only or ("lstm", "gpt"):
            adaptive(options.device, key, repeats)
        return
    keys = options.only or USUAL[options.device]
    if options.side_by_side:
        lines = side_by_side(options.device, keys, repeats)
    else:
        global TURNS
        TURNS = None if options.turns is None else options.turns.open("w")
        lines = compared(options.device, keys, repeats)
    if options.turns is not None:
        print(json.dumps(lines))
        return
    about = f"{machine}, torch {torch.__version__}, {datetime.date.today()}; medians of {repeats} steps."
    if options.write is not None:
        write(options.write, options.device, about, lines)


if __name__ == "__main__":
    main()
