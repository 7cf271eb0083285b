"""An audit from the file to the page, against the bare forward pass over the same batches.

    python benchmarks/end_to_end.py [--millions 50] [--device cuda] [--dtype bfloat16] [--model gpt2|lstm] [--corpus FILE] [--budget 300]

A corpus as benchmarks/scale.py makes it, of so many million tokens, or FILE that an earlier call left, is audited by `tightlip.audit`: read,
tokenised, scanned, counted, reported. Then the model alone runs over the same padded batches, to full logits
with which nothing is done. Both are warm: imports are told apart. Asked for on an H200, 50 million tokens: at
most 1.25. On a CPU give fewer tokens: --millions 0.2.

Stages are those of the main thread: on a GPU some or all of the scan is done while the first one lasts. With
--budget, the forward pass is over random shards until so many seconds have passed since the start, at least
a tenth of them, and scaled by their tokens; the output says which share it was. It needs torch,
transformers, numpy, numba, pyarrow, pydivsufsort, and rich and Jinja for the page; no duckdb, datasets or ray.
The model is untrained and has hardly a run, so what follows the scan is less than it is for a trained one.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import wraps
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import tightlip
from scale import SENTENCES, make_model, make_tokenizer, write_corpus
from tightlip.audit.leakage import audit, findings
from tightlip.core.devices import full_precision
from tightlip.report import kit
from tightlip.scan.scanner import Filling, Scanner, segments_of
from tightlip.scan.scans import Scans
from tightlip.scan.store import PLAIN, shard_edges

MEAN_TOKENS = 13.4  # of a sentence that scale.py asks for: it gives a few sentences less
STAGES = {
    "read and tokenise": (audit, "tokenised_for"),
    "scan, what is left": (Scans, "scan"),
    "runs and count": (audit, "find_leaks"),
    "by text": (audit, "read_by_text"),
    "tables": (findings, "write_report"),
    "page": (kit, "write_page"),
}


def clocked(seconds, answers):
    """Let each stage add to `seconds`, and keep its last answer."""

    def watch(name, plain):
        @wraps(plain)
        def call(*given, **how):
            start = time.perf_counter()
            answers[name] = plain(*given, **how)
            seconds[name] += time.perf_counter() - start
            return answers[name]

        return call

    for name, (where, function) in STAGES.items():
        setattr(where, function, watch(name, getattr(where, function)))


def seconds_of_imports():
    """Seconds of a process that imports what an audit does, by the clock and of the CPU."""
    code = "import time; import tightlip.commands, tightlip.audit.leakage.audit; print(time.process_time())"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return time.perf_counter() - start, float(done.stdout.split()[-1])


def bare_forward(model, scanner, corpus, device, until=float("inf")):
    """Seconds of the model alone over the batches that the scan makes of each shard, and the share of
    tokens that it was measured on: shards at random, until the time is over."""
    seconds, num_tokens = 0.0, 0
    shards = [*pairwise(shard_edges(corpus.bounds))]
    for done, number in enumerate(np.random.default_rng(0).permutation(len(shards))):
        if time.perf_counter() > until and done >= len(shards) / 10:
            break
        first, end = shards[number]
        bounds = corpus.bounds[first : end + 1]
        cover = segments_of(np.diff(bounds), scanner.bos_id is not None, scanner.window)
        whole = Filling(tokens=corpus.tokens, bounds=bounds, cover=cover, scorer=PLAIN, columns=[])
        sizes = cover.ends - cover.starts
        batches = [
            torch.from_numpy(scanner._padded(whole, rows, 0, int(sizes[rows].max()))[0])
            for rows in scanner._batches(cover)
        ]
        synchronise(device)
        start = time.perf_counter()
        with torch.inference_mode(), full_precision():
            for inputs in batches:
                model(input_ids=inputs.to(device), use_cache=False)
        synchronise(device)
        seconds += time.perf_counter() - start
        num_tokens += int(bounds[-1] - bounds[0])
    share = num_tokens / corpus.num_tokens
    return seconds / share, share


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", choices=["lstm", "gpt2"], default="lstm")
    parser.add_argument(
        "--corpus", type=Path, help="made and left there, unless it is there already"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all of it")
    arguments = parser.parse_args()
    device, part = arguments.device, round(SENTENCES * MEAN_TOKENS / (arguments.millions * 1e6))
    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    print(f"{where}, torch {torch.__version__}, tightlip {tightlip.__version__}, {arguments.model}, {arguments.dtype}")  # fmt: skip
    print("imports: {:.1f} s by the clock, {:.1f} s of the CPU".format(*seconds_of_imports()))
    model, tokenizer = make_model(arguments.model, device, arguments.dtype), make_tokenizer(None)
    stages, answers = defaultdict(float), {}
    clocked(stages, answers)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file, start = arguments.corpus or folder / "corpus.parquet", time.perf_counter()
        write_corpus(folder / "small.parquet", max(part, 20_000))
        if not file.exists():
            write_corpus(file, part)
        print(f"making the corpus: {time.perf_counter() - start:.1f} s", flush=True)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        how = {"device": device, "dtype": arguments.dtype}
        tightlip.audit(folder / "model", folder / "small.parquet", out=folder / "first", **how)
        few = answers["read and tokenise"]  # its files are gone, and stay mapped
        stages.clear()
        start = time.perf_counter()
        report = tightlip.audit(folder / "model", file, out=folder / "audit", **how)
        whole, corpus = time.perf_counter() - start, answers["read and tokenise"]
        print(f"{corpus.num_tokens:,} tokens, {report.summary['sequences_in_s']:,} runs, end to end {whole:.2f} s", flush=True)  # fmt: skip
        scanner = Scanner(model, bos_id=tokenizer.bos_token_id)
        bare_forward(model, scanner, few, device)
        bare, share = bare_forward(model, scanner, corpus, device, began + arguments.budget)
    for name, seconds in {**stages, "everything else": whole - sum(stages.values())}.items():
        print(f"{name:26} {seconds:8.2f} s {seconds / bare:6.2f} of the forward pass")
    print(f"{'end to end':26} {whole:8.2f} s {whole / bare:6.2f}")
    told = "" if share == 1 else f", from {share:.0%} of the tokens, in shards drawn at random"
    print(f"{'forward pass':26} {bare:8.2f} s{told}")


if __name__ == "__main__":
    main()
