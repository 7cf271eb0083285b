"""Whether averaged weights, and Adam corrected for noise, make private training learn more.

    python benchmarks/private_utility.py blogs_8000users.parquet wikitext2/train.parquet --work DIR

The first file's users are trained on, the second gives the words and is public. A GRU is trained at each
ε with Adam and with `adam_correction`, and judged on held-out text twice: its weights as they are, and
their average. Each of the four has the rate that did best under seed 0, of a grid of its own; the
table is of the other seeds, noise and draws paired. Seeds are known, so nobody is protected
by these runs: they measure learning only.

Results are appended to DIR/results.jsonl and what is there is not run again, so a stopped call goes on;
--budget-seconds ends one cleanly, between two runs. Beside torch, transformers, numpy, numba and pyarrow it
needs dp-accounting, scipy, mpmath and tomli-w, and no network. A tiny one, for a minute of a CPU:

    ... --users 200 --steps 4 --batch-size 32 --seeds 1 2 --rates 0.01 --corrected-rates 0.01
"""

import argparse
import itertools
import json
import logging
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from scipy import stats

import tightlip
from tightlip.core import register
from tightlip.training import loop
from tightlip.training.config import RunOptions
from tightlip.training.losses import perplexity, validation_scores

TUNING_SEED = 0
HELD_OUT = 1500  # documents at most, each of another user
judged = {}  # of the run under way


class JudgedTwice(loop.Training):
    """A run that also judges its weights as they are, beside their average."""

    def measure(self):
        line = super().measure()
        scores = validation_scores(self.forward, self.recipe.validation)
        judged["weights"] = perplexity(scores.loss_nats, scores.num_targets)
        judged["average"] = line["validation_perplexity"]
        judged["by_frequency"] = self.to_beat.get("validation_perplexity_by_frequency")
        return line


def prepared(options, work):
    """The users' text, one document of some held out, in the words of the public file."""
    if not (work / "corpus").exists():
        words = {"split": "none", "vocabulary_size": options.vocabulary_size}
        public = tightlip.prepare(anybodys(options.public), work / "public", **words)
        rows = pq.read_table(options.private, columns=["user", "text"])
        users = np.asarray(rows["user"].to_pylist())
        chosen = {*list(dict.fromkeys(users.tolist()))[: options.users]}
        rows = rows.filter([user in chosen for user in users])
        users = np.asarray(rows["user"].to_pylist())
        _, first, counts = np.unique(users, return_index=True, return_counts=True)
        held = np.sort(first[counts > 1])[:HELD_OUT]
        pq.write_table(rows.take(held), work / "held_out.parquet")
        kept = np.setdiff1d(np.arange(len(rows)), held)
        tightlip.prepare(
            rows.take(kept),
            work / "corpus",
            tokenizer=str(public.tokenizer_folder),
            validation=str(work / "held_out.parquet"),
        )
    return work / "corpus"


def anybodys(path):
    """Public text, a user a line: whose it is does not matter."""
    texts = [text for text in pq.read_table(path)["text"].to_pylist() if text.strip()]
    return [{"user": str(number), "text": text} for number, text in enumerate(texts)]


def train(options, work, epsilon, corrected, rate, seed):
    private = {"mitigation": "dp", "epsilon": epsilon, "rows_per_unit": 1, "insecure_seed": seed}
    if corrected:
        private["adam_correction"] = options.floor
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    tightlip.train(
        work / "corpus",
        out,
        model="gru",
        num_layers=1,
        embedding_size=options.size,
        hidden_size=options.size,
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        steps=options.steps,
        learning_rate=rate,
        average_weights=options.average,
        snapshot="none",
        seed=seed,
        options=RunOptions(device=options.device, physical_rows=options.physical_rows),
        **({} if epsilon is None else private),
    )
    shutil.rmtree(out)
    return dict(judged)


class Results:
    """Runs by what they were asked for, kept in a file."""

    def __init__(self, options, work):
        self.options, self.work, self.file = options, work, work / "results.jsonl"
        self.started = time.monotonic()
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known = {tuple(line["asked"]): line for line in map(json.loads, lines)}

    def of(self, *asked):
        """A run's perplexities; it is run where it has not been."""
        if asked not in self.known:
            if time.monotonic() - self.started > self.options.budget_seconds:
                sys.exit("The budget is spent. Give the same command again to go on.")
            begun = time.monotonic()
            found = {"asked": asked, **train(self.options, self.work, *asked)}
            found["seconds"] = round(time.monotonic() - begun, 1)
            with self.file.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
            self.known[asked] = found
        return self.known[asked]

    def best_rate(self, epsilon, corrected, way):
        rates = self.options.corrected_rates if corrected else self.options.rates
        found = {
            rate: self.of(epsilon, corrected, rate, TUNING_SEED)[way] or math.inf for rate in rates
        }
        return min(found, key=found.get)


def interval(values):
    """The mean and half the width of its 95% interval, by Student's t."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    return mean, float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def table(results, options):
    """Markdown, one line for each ε and way."""
    yield "| | rate | validation perplexity | against Adam | helps |"
    yield "|---|---|---|---|---|"
    for epsilon in (None, *options.epsilons):
        name = "plain" if epsilon is None else f"ε = {epsilon:g}"
        plain = {}
        for corrected, way in itertools.product((False, True), ("weights", "average")):
            if epsilon is None and corrected:
                continue
            rate = results.best_rate(epsilon, corrected, way)
            logs = {
                seed: math.log(results.of(epsilon, corrected, rate, seed)[way])
                for seed in options.seeds
            }
            plain = plain or logs
            words = [name, *(["corrected"] * corrected), *(["averaged"] * (way == "average"))]
            yield f"| {', '.join(words)} | {rate:g} | {compared(logs, plain)} |"
    frequencies = {line["by_frequency"] for line in results.known.values()} - {None}
    yield f"| word frequencies alone | | {max(frequencies, default=math.nan):.1f} | | |"


def compared(logs, plain):
    perplexities = interval([math.exp(value) for value in logs.values()])
    shown = f"{perplexities[0]:.1f} ± {perplexities[1]:.1f}"
    if logs is plain:
        return f"{shown} | | "
    mean, half = interval([logs[seed] - plain[seed] for seed in logs])
    share = f"{math.expm1(mean):+.1%} ({math.expm1(mean - half):+.1%} to {math.expm1(mean + half):+.1%})"
    verdict = "yes" if mean + half < 0 else "no, it harms" if mean - half > 0 else "not shown"
    return f"{shown} | {share} | {verdict}"


def main():
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about.add_argument("private", help="users' text, a Parquet file with user and text")
    about.add_argument("public", help="public text, a Parquet file with text")
    about.add_argument("--work", type=Path, required=True)
    about.add_argument("--device", default="auto")
    about.add_argument("--users", type=int, default=None)
    about.add_argument("--epsilons", type=float, nargs="*", default=[2.0, 8.0])
    about.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    about.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2, 1.7e-2, 3e-2])
    about.add_argument(
        "--corrected-rates", type=float, nargs="+", default=[3e-3, 6e-3, 1e-2, 1.7e-2]
    )
    about.add_argument("--floor", type=float, default=1.0, help="adam_correction")
    about.add_argument("--average", type=float, default=0.999, help="average_weights")
    about.add_argument("--steps", type=int, default=100)
    about.add_argument("--batch-size", type=int, default=256)
    about.add_argument("--sequence-length", type=int, default=16)
    about.add_argument("--size", type=int, default=64, help="of embeddings and of the GRU's layer")
    about.add_argument("--vocabulary-size", type=int, default=2000)
    about.add_argument("--physical-rows", type=int, default=None)
    about.add_argument("--budget-seconds", type=float, default=math.inf)
    options = about.parse_args()
    logging.disable(logging.WARNING)
    loop.Training = JudgedTwice
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    with register.kept_in(work / "register"):  # these runs are nobody's business elsewhere
        prepared(options, work)
        lines = [*table(Results(options, work), options)]
    cuda = torch.cuda.is_available() and options.device != "cpu"
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"\n{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; {vars(options)}\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
