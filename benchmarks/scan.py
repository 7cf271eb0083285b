"""The audit's scan against the model's own forward pass over the same batches.

    python benchmarks/scan.py [--device cpu|cuda]

The forward pass ends with full logits and does nothing with them; the scan ends with every
token's rank and log-probability. Both run the same padded batches, in turns; medians. Beside it
scans of decodings (`tightlip extract`) against the plain scan: with temperature alone at most 1.15
is asked for on a GPU, with truncation 1.4. Untrained models are unsure, so that with top-p most
rows' nuclei must be looked for: trained ones cost less. Kernels are checked before they are timed.
"""

import argparse
import platform
import statistics
import time
from itertools import pairwise

import numpy as np
import torch

import tightlip
from tightlip.core.devices import full_precision
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.scan.decoding import decode_with_torch, decoded_log_probs, scorer_of
from tightlip.scan.options import Decoding
from tightlip.scan.scanner import Filling, Scanner, segments_of
from tightlip.scan.store import PLAIN

DECODINGS = {
    "τ": Decoding(temperature=0.8),
    "τ, k": Decoding(temperature=0.8, top_k=40),
    "τ, p": Decoding(temperature=0.8, top_p=0.95),
    "τ, k, p": Decoding(temperature=0.8, top_k=40, top_p=0.95),
}


def lstm(vocab_size, size):
    config = LSTMConfig(vocab_size=vocab_size, embedding_size=size, hidden_size=size, num_layers=2)
    return LSTMForCausalLM(config)


def gpt2_small(vocab_size=50_257):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size))


SETTINGS = {
    "cpu": [("LSTM 2×128, vocabulary 10k", lambda: lstm(10_000, 128), 60_000, ["float32"])],
    "cuda": [
        ("GPT-2 small", gpt2_small, 80_000, ["bfloat16", "float32"]),
        (
            "LSTM 2×550, vocabulary 40k",
            lambda: lstm(40_000, 550),
            400_000,
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
    whole = Filling(tokens=tokens, bounds=bounds, cover=cover, scorer=PLAIN, columns=[])
    sizes = cover.ends - cover.starts
    batches = [
        torch.from_numpy(scanner._padded(whole, rows, 0, int(sizes[rows].max()))[0])
        for rows in scanner._batches(cover)
    ]

    def forward():
        with torch.inference_mode(), full_precision():
            for inputs in batches:
                model(input_ids=inputs.to(device), use_cache=False)

    def scan(scorer=PLAIN):
        scanner.scan(tokens, bounds, scorer)

    scorers = [scorer_of(decoding) for decoding in DECODINGS.values()]
    forward(), scan()  # compile, warm up
    for scorer in scorers:
        scan(scorer)
    check(model, scanner, device)
    check_decodings(model.config.vocab_size, getattr(torch, dtype), device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rounds = []
    for _ in range(repeats):
        own, plain = timed(device, forward), timed(device, scan)
        others = [timed(device, lambda scorer=scorer: scan(scorer)) / plain for scorer in scorers]
        rounds.append([own, plain / own, *others])
    own, *ratios = (statistics.median(column) for column in zip(*rounds, strict=True))
    return own, ratios, len(tokens)


def check_decodings(width, dtype, device):
    """The decodings' kernels against sorting every row: sure and unsure rows, and many ties."""
    draw = torch.Generator().manual_seed(0)
    for scale, is_whole in ((0.02, False), (2.0, False), (8.0, False), (1.5, True)):
        logits = torch.randn(300, width, generator=draw) * scale
        logits = (logits.round() if is_whole else logits).to(device, dtype)
        likely = logits.float().topk(20).indices[:, -1].cpu()
        targets = torch.where(torch.arange(300) % 2 == 0, likely, torch.randint(width, (300,), generator=draw)).to(device)  # fmt: skip
        for name, decoding in DECODINGS.items():
            found = decoded_log_probs(logits, targets, decoding)
            want = decode_with_torch(logits, targets, decoding)
            close = torch.isclose(found, want, rtol=1e-4, atol=1e-3)
            # A row in hundreds lies within rounding of an edge and may fall either way.
            assert close.float().mean() > 0.98, f"{name} disagrees at scale {scale}"


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
    decodings = "".join(f"{name:>9}" for name in DECODINGS)
    print(
        f"{'setting':28} {'dtype':9} {'forward, ktok/s':>16} {'scan / forward':>15}{decodings}  / scan"
    )
    for name, make_model, num_tokens, dtypes in SETTINGS[arguments.device]:
        for dtype in dtypes:
            own, (ratio, *others), size = compare(
                make_model, num_tokens, dtype, arguments.device, arguments.repeats
            )
            beside = "".join(f"{other:9.2f}" for other in others)
            print(f"{name:28} {dtype:9} {size / own / 1e3:16.0f} {ratio:15.2f}{beside}")


if __name__ == "__main__":
    main()
