"""What `tightlip dp-check` can tell: its power, its honesty, and which planted texts are strongest.

    python benchmarks/dp_check.py power            a table over ε, sampling rate and canaries
    python benchmarks/dp_check.py engine [--runs 40]   the real engine, with its noise and with half of it
    python benchmarks/dp_check.py texts [--seeds 5] [--device cpu|cuda] [--model DIR]

Power is that of canaries which nothing but noise hides. `texts` trains without noise, so that what
differs is the texts alone: how often a text that was trained on ranks before one that was not.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata
from torch import nn

import tightlip
from tightlip.audit.dp_check import Claim, check_guesses, text_scores
from tightlip.audit.trade_off import Steps, best_num_guesses, even, rejected_share
from tightlip.core.errors import UsageError
from tightlip.core.files import read_sealed
from tightlip.core.run_folder import DP_CHECK, ENGINE_CHECK, open_run
from tightlip.corpus.canaries import read_check_key
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.privacy.accounting import Mechanism
from tightlip.privacy.noise_schedules import CPUNoise
from tightlip.privacy.plans import noise_for_target
from tightlip.privacy.private_training import PrivateTraining
from tightlip.scan.models import open_model
from tightlip.scan.options import ScanOptions

DELTA = 1e-5
CLAIMS = [(2, 0.01, 1000), (2, 0.1, 1000), (2, 0.1, 100), (8, 0.01, 1000), (8, 0.1, 300), (8, 0.5, 40), (8, 0.5, 1000)]  # fmt: skip


def claimed(epsilon, rate, steps):
    mechanism = Mechanism(noise_multiplier=1.0, sampling_rate=rate)
    sigma = noise_for_target(mechanism, epsilon, DELTA, steps)
    return Steps(noise_multiplier=sigma, sampling_rate=rate, steps=steps)


def power(_):
    print(f"{'ε':>4}{'q':>7}{'steps':>7}{'noise':>8}{'canaries':>10}{'text':>7}{'engine':>8}{'false, text':>13}")  # fmt: skip
    for epsilon, rate, steps in CLAIMS:
        claim = claimed(epsilon, rate, steps)
        for m in (100, 1000, 5000):
            number, text = best_num_guesses(claim, m)
            draws = 40 if m <= 1000 else 10
            engine = rejected_share(claim, m, even(m, 0.5), noise=0.5, watched=True, num_draws=draws)  # fmt: skip
            false = rejected_share(claim, m, number, noise=1.0, num_draws=2000)
            print(f"{epsilon:>4}{rate:>7}{steps:>7}{claim.noise_multiplier:>8.2f}{m:>10,}{text:>7.0%}{engine:>8.0%}{false:>13.2%}", flush=True)  # fmt: skip


def engine_verdict(share, seed, claim):
    """One training of a small model whose noise is `share` of what its ledger says."""
    honest = CPUNoise.add
    CPUNoise.add = lambda self, tensors, *, scale, **more: honest(self, tensors, scale=scale * share, **more)  # fmt: skip
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
    documents = list(torch.randint(0, 6, (200, 5)))
    try:
        with tempfile.TemporaryDirectory() as folder:
            training = PrivateTraining(
                *(model, torch.optim.SGD(model.parameters(), lr=0.1), documents),
                ledger=Path(folder) / "ledger.json", noise_multiplier=claim.noise_multiplier, delta=DELTA,
                expected_batch=claim.sampling_rate * len(documents), steps=claim.steps, check_canaries=1000,
            )  # fmt: skip
            while training.has_budget():
                training.step()
            record = training.guarantee()
            training.close()
            there, _ = read_sealed(Path(folder) / ENGINE_CHECK)
    finally:
        CPUNoise.add = honest
    scores, included = np.array(there["scores"]), np.array(there["included"], bool)
    return check_guesses(scores, included, Claim.of(record), independent=True).verdict


def engine(options):
    print(
        f"{'ε':>4}{'q':>7}{'steps':>7}{'runs':>6}{'half the noise found':>22}{'honest accused':>16}"
    )
    for epsilon, rate, steps in [(2, 0.1, 20), (8, 0.5, 10), (2, 0.02, 100), (8, 0.05, 60)]:
        claim, runs = claimed(epsilon, rate, steps), range(options.runs)
        found = [
            sum(engine_verdict(share, seed, claim) == "contradicted" for seed in runs)
            for share in (0.5, 1.0)
        ]
        print(f"{epsilon:>4}{rate:>7}{steps:>7}{options.runs:>6}{found[0]:>22}{found[1]:>16}", flush=True)  # fmt: skip


def ranked_before(scores, included):
    """AUC: how often a text that was in ranks before one that was out."""
    ranks = rankdata(scores)
    num_in, num_out = included.sum(), (~included).sum()
    return (ranks[included].sum() - num_in * (num_in + 1) / 2) / (num_in * num_out)


def made_corpus(path, seed, num_users=80):
    """Sentences of a small grammar, so that some words are frequent and most are not."""
    draw = random.Random(seed)
    words = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    weights = [1 / (place + 1) for place in range(len(words))]
    with path.open("w") as file:
        for number in range(num_users * 5):
            text = " ".join(draw.choices(words, weights, k=14))
            file.write(json.dumps({"user": f"u{number % num_users}", "text": text}) + "\n")


def with_unused_rows(model_folder, folder, num_rows=64):
    """The model with rows beyond its tokenizer, as published ones have that are padded to even sizes."""
    model, tokenizer = load_causal_lm(str(model_folder)), load_tokenizer(model_folder)
    model.resize_token_embeddings(model.config.vocab_size + num_rows)
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    return folder


def texts(options):
    print(
        f"{'start':10}{'kind':10}{'AUC':>7}   over {options.seeds} seeds (mean ± 2 standard errors)"
    )
    common = {"hidden_size": 32, "embedding_size": 32, "num_layers": 1, "batch_size": 16}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made_corpus(folder / "public.jsonl", 99)
        start = options.model
        if start is None:
            public = tightlip.train(
                folder / "public.jsonl", folder / "public", epochs=6, seed=0, **common
            )
            start = str(with_unused_rows(public.model_folder, folder / "start"))
        cases = [("new", "random"), ("new", "rare")]
        cases += [("tuned", kind) for kind in ("random", "rare", "sampled", "new")]
        for begin, kind in cases:
            found = []
            for seed in range(options.seeds):
                corpus, out = folder / f"{seed}.jsonl", folder / f"{begin}-{kind}-{seed}"
                made_corpus(corpus, seed)
                own = {"model": start} if begin == "tuned" else common
                if begin == "new":
                    own = common | {"prepare": {"tokenizer": start}}
                try:
                    tightlip.train(
                        corpus, out, mitigation="dp", noise_multiplier=0.0, clip_norm=1.0, seed=seed, epochs=4,
                        dp_check_canaries=200, dp_check_kind=kind, dp_check_engine=0, allow_unproved=True,
                        **({"batch_size": 16} | own),
                    )  # fmt: skip
                except UsageError as error:
                    print(f"{begin:10}{kind:10}{'-':>7}   {error}")
                    break
                run = open_run(out)
                opened = open_model(run.model_folder, ScanOptions(device=options.device))
                key = out / DP_CHECK
                scores = text_scores(run, opened, key)
                found.append(ranked_before(scores, read_check_key(key).included_M))
            if found:
                spread = 2 * np.std(found, ddof=1) / np.sqrt(len(found))
                print(f"{begin:10}{kind:10}{np.mean(found):>7.3f}   ± {spread:.3f}", flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=("power", "engine", "texts"))
    options.add_argument("--runs", type=int, default=40)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--device", default="cpu")
    options.add_argument(
        "--model", help="a folder to fine-tune, instead of a small model made here"
    )
    chosen = options.parse_args()
    {"power": power, "engine": engine, "texts": texts}[chosen.what](chosen)


main()
