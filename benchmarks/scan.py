"""The audit's scan against the model's own forward pass over the same batches.

    python benchmarks/scan.py [--device cpu|cuda]

The forward pass ends with full logits and does nothing with them; the scan ends with every
token's rank and log-probability. Both run the same padded batches, in turns; medians.
"""

import argparse
import platform
import statistics
import time
from itertools import pairwise

import numpy as np
import torch

import tightlip
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.scan.scanner import Filling, Scanner, full_precision, segments_of


def lstm(vocab_size, size):
    config = LSTMConfig(vocab_size=vocab_size, embedding_size=size, hidden_size=size, num_layers=2)
    return LSTMForCausalLM(config)


def gpt2_small(vocab_size=50_257):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size))


SETTINGS = {
    "cpu": [("LSTM 2×128, vocabulary 10k", lambda: lstm(10_000, 128), 60_000, ["float32"])],
    "cuda": [
        ("GPT-2 small", gpt2_small, 400_000, ["bfloat16", "float32"]),
        (
            "LSTM 2×550, vocabulary 40k",
            lambda: lstm(40_000, 550),
            2_000_000,
            ["bfloat16", "float32"],
        ),
    ],
}


def random_documents(num_tokens, vocab_size):
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 600, size=num_tokens // 300)
    bounds = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    return draw.integers(4, vocab_size, size=bounds[-1]).astype(np.int32), bounds


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device, work):
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def compare(make_model, num_tokens, dtype, device, repeats):
    torch.manual_seed(0)
    model = make_model().to(device=device, dtype=getattr(torch, dtype)).eval()
    tokens, bounds = random_documents(num_tokens, model.config.vocab_size)
    scanner = Scanner(model, bos_id=2)
    cover = segments_of(np.diff(bounds), True, scanner.window)
    whole = Filling(tokens=tokens, bounds=bounds, cover=cover, ranks=tokens, log_probs=tokens)
    sizes = cover.ends - cover.starts
    batches = [
        torch.from_numpy(scanner._padded(whole, rows, 0, int(sizes[rows].max()))[0])
        for rows in scanner._batches(cover)
    ]

    def forward():
        with torch.inference_mode(), full_precision():
            for inputs in batches:
                model(input_ids=inputs.to(device), use_cache=False)

    def scan():
        scanner.scan(tokens, bounds)

    forward(), scan()  # compile, warm up
    check(model, scanner, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pairs = [(timed(device, forward), timed(device, scan)) for _ in range(repeats)]
    own = statistics.median(first for first, _ in pairs)
    ratio = statistics.median(second / first for first, second in pairs)
    return own, ratio, len(tokens)


def check(model, scanner, device):
    """The kernel against plain operations in float64, on fresh random text."""
    tokens, bounds = random_documents(3_000, model.config.vocab_size)
    ranks, log_probs = scanner.scan(tokens, bounds)
    for begin, end in pairwise(bounds[:4]):
        row = torch.from_numpy(np.r_[2, tokens[begin : end - 1]].astype(np.int64)).to(device)[None]
        with torch.inference_mode(), full_precision():
            logits = model(input_ids=row).logits[0].double().cpu()
        target = logits.gather(1, torch.from_numpy(tokens[begin:end].astype(np.int64))[:, None])
        expected = (target - logits.logsumexp(1, keepdim=True))[:, 0].numpy()
        assert np.abs(log_probs[begin:end] - expected).max() < 2e-2, "log-probabilities disagree"
        above = (logits > target).sum(1).numpy()
        # Batched and single rows round differently, so a close call may fall either way.
        assert np.abs(ranks[begin:end] - above).mean() < 0.01 * model.config.vocab_size


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor()
    print(f"{where}, torch {torch.__version__}, tightlip {tightlip.__version__}")
    print(f"{'setting':28} {'dtype':9} {'forward, ktok/s':>16} {'scan / forward':>15}")
    for name, make_model, num_tokens, dtypes in SETTINGS[arguments.device]:
        for dtype in dtypes:
            own, ratio, size = compare(
                make_model, num_tokens, dtype, arguments.device, arguments.repeats
            )
            print(f"{name:28} {dtype:9} {size / own / 1e3:16.0f} {ratio:15.2f}")


if __name__ == "__main__":
    main()
