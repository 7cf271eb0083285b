"""Who is found: fine-tunes of SmolLM2-135M, a GRU and an LSTM, plainly, with a regulariser and with DP.

    python benchmarks/membership.py --mail git_list.parquet --model SmolLM2-135M-Instruct.Q4_1.gguf \\
        --work DIR --budget-seconds 540

A cell is a way (gru, lstm, full, lora), a mitigation and a seed. Under each seed the pool of documents
is shuffled anew: 1,200 are trained on and 1,200 are not. The model starts from a base that saw
neither: SmolLM2 as it is, or a recurrent model trained on other documents of the same list, whose
words the vocabulary is. The base is the one reference. Cells are kept in DIR/results.jsonl and the
same command goes on where one stopped, as in private_fine_tuning.py, which says where the weights come
from.

What is counted, stated before any cell was run on a GPU:

- For each score of `tightlip membership` the share of members found at 1% false accusations, and the
  AUC, of documents; the mean over the seeds with Student's 95% interval.
- EZ leads. A claim about a mitigation is a claim about EZ: it holds where the interval over seeds of
  the difference from the plain cell of the same way and seed is on one side of 0.
- Old scores (loss, reference, min-k%, zlib) "were too kind" to a cell where none of them finds 10% of the
  members at 1% in the mean over seeds, and EZ or WBC finds 20% or more.
- Beside each, the validation perplexity, on the documents that were not trained on: a quieter model that
  learnt less is no finding.

Nothing is tuned on these documents: rates and steps are the flags' defaults, or were chosen on others.

A tiny one for a CPU:

    ... --ways gru --mitigations none --documents 200 --base-documents 500 --seeds 1 --epochs 1
"""

import logging
import math
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tightlip
from private_fine_tuning import (
    FEW_BOOTSTRAPS,
    FIGURES,
    Kept,
    base_of,
    flags,
    go_on,
    interval,
    shuffled,
)
from tightlip.training.config import RunOptions

RECURRENT = ("gru", "lstm")
MITIGATIONS = {
    "none": {},
    "by-user": {"mitigation": "adversarial", "privacy_weight": 0.0},
    "adversarial": {"mitigation": "adversarial", "privacy_weight": 1.0},
    "triplet": {"mitigation": "triplet", "privacy_weight": 0.03},
    "dp-8": {"mitigation": "dp", "epsilon": 8.0},
    "dp-2": {"mitigation": "dp", "epsilon": 2.0},
}


class Memberships(Kept):
    def __init__(self, options, work):
        super().__init__(options, work)
        rows = [
            row | {"text": row["text"][: options.characters]}
            for row in shuffled(options.mail)[: 2 * options.documents + options.base_documents]
        ]
        # A text that stands twice would be on both sides, or in the base's.
        rows = [*{row["text"]: row for row in rows}.values()]
        self.pool, self.others = rows[: 2 * options.documents], rows[2 * options.documents :]
        self.how = RunOptions(
            device=self.device, bf16=self.device == "cuda", physical_rows=options.physical_rows
        )

    def ready(self):
        for way in self.options.ways:
            base = self.base(way)
            for seed in self.options.seeds:
                self.prepared(way, seed, base)

    def base(self, way):
        """The model that a way starts from, which is the reference too."""
        if way not in RECURRENT:
            return base_of(self.options, self.work)
        folder, corpus = self.work / f"base-{way}", self.work / "base-corpus"
        if not corpus.exists():
            tightlip.prepare(
                self.others, corpus, vocabulary_size=self.options.vocabulary, split="text"
            )
        if not (folder / "ledger.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            tightlip.train(
                corpus,
                folder,
                model=way,
                embedding_size=128,
                hidden_size=256,
                num_layers=1,
                epochs=self.options.base_epochs,
                learning_rate=2e-3,
                batch_size=32,
                sequence_length=self.options.sequence_length,
                snapshot="none",
                options=RunOptions(device=self.device),
            )
        return folder / "model"

    def prepared(self, way, seed, base):
        """Under a seed: half of the pool to train on, the other half held out."""
        kind = way if way in RECURRENT else "hub"
        out = self.work / f"corpus-{kind}-{seed}"
        if not out.exists():
            order = np.random.default_rng(seed).permutation(len(self.pool))
            members, others = np.array_split(order, 2)
            held = self.work / f"held-{seed}.parquet"
            pq.write_table(pa.Table.from_pylist([self.pool[place] for place in others]), held)
            tightlip.prepare(
                [self.pool[place] for place in members],
                out,
                tokenizer=str(base),
                validation=str(held),
            )
        return out

    def settings(self, way, mitigation):
        given, options = dict(MITIGATIONS[mitigation]), self.options
        if way == "lora":
            given["lora"] = options.lora
        if given.get("mitigation") == "dp":
            given |= {"unit": "example", "batch_size": options.batch_size, "steps": options.steps}
            given |= {"clip_norm": options.clip_norm}
            rate = options.recurrent_private_rate
        else:
            given |= {"batch_size": options.plain_batch_size, "epochs": options.epochs}
            rate = options.recurrent_rate
        kind = "private" if given.get("mitigation") == "dp" else "plain"
        if way not in RECURRENT:
            (rate,) = getattr(options, f"{way}_{kind}_rates")
        return given | {"learning_rate": rate}

    def run(self, way, mitigation, seed):
        base, out = self.base(way), self.own / "run"
        shutil.rmtree(out, ignore_errors=True)  # of the cell before
        corpus = self.prepared(way, seed, base)
        with self.timed("train"):
            tightlip.train(
                corpus,
                out,
                model=str(base),
                sequence_length=self.options.sequence_length,
                snapshot="none",
                seed=seed,
                options=RunOptions(device=self.device) if way in RECURRENT else self.how,
                **self.settings(way, mitigation),
            )
        self.lend_scans(corpus.name, out)
        with self.timed("membership"):
            found = tightlip.measure_membership(
                out, reference=str(base), device=self.device, num_bootstraps=FEW_BOOTSTRAPS
            )
        self.keep_scans(corpus.name, out, base)
        with self.timed("perplexity"):
            groups = tightlip.measure_groups(out, device=self.device, num_bootstraps=FEW_BOOTSTRAPS)
        level = found["documents"]
        scores = {name: score for name, score in level["scores"].items() if score is not None}
        return {
            "validation_perplexity": groups["perplexity"]["value"],
            "settings": self.settings(way, mitigation),
            "num_members": level["num_members"],
            "num_nonmembers": level["num_nonmembers"],
            "scores": {n: {f: one[f] for f in FIGURES} for n, one in scores.items()},
            "by_length": [
                {"longest": one["longest"], "ez": one["scores"]["ez"]["auc"]}
                for one in found["by_length"]
            ],
        }

    def all(self):
        """The first seed of all before the second of any."""
        for seed in self.options.seeds:
            for way in self.options.ways:
                asked = self.options.mitigations
                if way not in RECURRENT:
                    asked = [one for one in asked if one in self.options.hub_mitigations]
                for mitigation in asked:
                    yield self.of(way, mitigation, seed)


def table(cells):
    """Markdown: AUC and the share found at 1%, by score, the mean over seeds with its interval."""
    names = [*next(iter(cells.known.values()))["scores"]] if cells.known else []
    heads = ["way", "mitigation", "seeds", "perplexity", *names, "EZ against none"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    groups = {}
    for (way, mitigation, _), found in cells.known.items():
        groups.setdefault((way, mitigation), []).append(found)
    for (way, mitigation), found in groups.items():
        shown = [
            f"{percents(found, name)} ({interval([one['scores'][name]['auc']['value'] for one in found])})"
            for name in names
        ]
        utility = interval([one["validation_perplexity"] for one in found])
        plain = {one["cell"][2]: found_at(one, "ez") for one in groups.get((way, "none"), ())}
        changes = [
            100 * (found_at(one, "ez") - plain[one["cell"][2]])
            for one in found
            if mitigation != "none" and plain.get(one["cell"][2]) is not None
        ]
        against = interval(changes) if changes else ""
        yield f"| {' | '.join([way, mitigation, str(len(found)), utility, *shown, against])} |"


def found_at(one, name):
    rate = one["scores"][name]["tpr_at_1_percent_fpr"]
    return math.nan if rate is None else rate["value"]


def percents(found, name):
    rates = [100 * found_at(one, name) for one in found]
    return "too few" if any(map(math.isnan, rates)) else f"{interval(rates)}%"


def main():
    about = flags()
    about.description = __doc__
    (model,) = (one for one in about._actions if one.dest == "model")
    model.required = False
    about.add_argument("--mitigations", nargs="+", default=[*MITIGATIONS], choices=[*MITIGATIONS])
    about.add_argument(
        "--hub-mitigations",
        nargs="*",
        default=["none", "dp-8", "dp-2"],
        choices=[*MITIGATIONS],
        help="those of them that full and lora are trained with, which take the most time",
    )
    about.add_argument("--base-documents", type=int, default=12_000, help="of a recurrent base")
    about.add_argument("--vocabulary", type=int, default=10_000, help="of a recurrent base")
    about.add_argument("--base-epochs", type=float, default=3.0)
    about.add_argument("--recurrent-rate", type=float, default=2e-3)
    about.add_argument("--recurrent-private-rate", type=float, default=5e-3)
    (ways,) = (one for one in about._actions if one.dest == "ways")
    ways.choices, ways.default = (*RECURRENT, "full", "lora"), ["lstm", "full", "lora"]
    about.set_defaults(documents=1200, epochs=5.0, plain_batch_size=32, batch_size=256)
    options = about.parse_args()
    if options.mail is None:
        sys.exit("Give --mail.")
    if options.model is None and set(options.ways) - {*RECURRENT}:
        sys.exit("Give --model, or --ways gru lstm.")
    logging.disable(logging.WARNING)
    go_on(Memberships, options, table)


if __name__ == "__main__":
    main()
