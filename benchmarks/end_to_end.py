"""An audit from the file to the page, against the bare forward pass over the same batches.

    python benchmarks/end_to_end.py [--millions 50] [--device cuda] [--dtype bfloat16] [--model gpt2|lstm] [--corpus FILE]

A corpus as benchmarks/scale.py makes it, of so many million tokens, or FILE that an earlier call left, is audited by `tightlip.audit`: read,
tokenised, scanned, counted, reported. Then the model alone runs over the same padded batches, to full logits
with which nothing is done. Both are warm: imports are told apart. Asked for on an H200, 50 million tokens: at
most 1.25. On a CPU give fewer tokens: --millions 0.2.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import tightlip
from scale import SENTENCES, make_model, make_tokenizer, write_corpus
from tightlip.core.devices import full_precision
from tightlip.core.progress import timed_tasks
from tightlip.corpus.opening import CorpusSource, tokenised_for
from tightlip.scan.scanner import Filling, Scanner, segments_of
from tightlip.scan.store import PLAIN, shard_edges

MEAN_TOKENS = 14  # of a sentence


def seconds_of_imports():
    """Median seconds of three processes that import what an audit does, by the clock and of the CPU."""
    code = "import time; import tightlip.commands, tightlip.audit.leakage.audit; print(time.process_time())"
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        taken.append((time.perf_counter() - start, float(done.stdout.split()[-1])))
    return np.median(np.array(taken), axis=0)


def bare_forward(model, scanner, corpus, device):
    """Seconds of the model alone over the batches that the scan makes of each shard."""
    seconds = 0.0
    for first, end in pairwise(shard_edges(corpus.bounds)):
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
    return seconds


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", choices=["lstm", "gpt2"], default="lstm")
    parser.add_argument(
        "--corpus", type=Path, help="made and left there, unless it is there already"
    )
    arguments = parser.parse_args()
    device, part = arguments.device, round(SENTENCES * MEAN_TOKENS / (arguments.millions * 1e6))
    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    print(f"{where}, torch {torch.__version__}, tightlip {tightlip.__version__}, {arguments.model}, {arguments.dtype}")  # fmt: skip
    wall, cpu = seconds_of_imports()
    print(f"imports: {wall:.1f} s by the clock, {cpu:.1f} s of the CPU")
    model = make_model(arguments.model, device, arguments.dtype)
    tokenizer = make_tokenizer(None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_corpus(folder / "small.parquet", max(part, 20_000))
        file = arguments.corpus or folder / "corpus.parquet"
        if not file.exists():
            write_corpus(file, part)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        how = {"device": device, "dtype": arguments.dtype}
        tightlip.audit(folder / "model", folder / "small.parquet", out=folder / "first", **how)
        with timed_tasks() as stages:
            start = time.perf_counter()
            report = tightlip.audit(folder / "model", file, out=folder / "audit", **how)  # fmt: skip
            whole = time.perf_counter() - start
        corpus = tokenised_for(CorpusSource(str(file), {}), tokenizer, folder / "tokens")  # fmt: skip
        scanner = Scanner(model, bos_id=tokenizer.bos_token_id)
        bare_forward(model, scanner, tokenised_for(CorpusSource(str(folder / "small.parquet"), {}), tokenizer, folder / "few"), device)  # fmt: skip
        bare = bare_forward(model, scanner, corpus, device)
    print(f"{corpus.num_tokens:,} tokens, {report.summary['sequences_in_s']:,} runs")
    for name, seconds in {**stages, "everything else": whole - sum(stages.values())}.items():
        print(f"{name:26} {seconds:8.2f} s {seconds / bare:6.2f} of the forward pass")
    print(f"{'end to end':26} {whole:8.2f} s {whole / bare:6.2f}")
    print(f"{'forward pass':26} {bare:8.2f} s")


if __name__ == "__main__":
    main()
