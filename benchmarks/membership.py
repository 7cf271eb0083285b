"""Who is found: fine-tunes of a GRU and an LSTM, plainly, with a regulariser and with DP.

    python benchmarks/membership.py --mail git_list.parquet --work DIR --processes 2

A cell is a way (gru, lstm), a mitigation and a seed. Under each seed the pool of documents is shuffled anew: 1,200 are
trained on and 1,200 are not. The model starts from a base trained on other documents of the same list, whose words
the vocabulary is; it is the one reference. Cells are kept in DIR/results.jsonl and the same command goes on where one
stopped, as in private_fine_tuning.py, which asks the same of SmolLM2.

What is counted, stated before any cell was run:

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

import itertools
import logging
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tightlip
from private_fine_tuning import (
    FEW_BOOTSTRAPS,
    FIGURES,
    REGULARISERS,
    Kept,
    auc,
    flags,
    found_at,
    go_on,
    header,
    interval,
    row,
    shuffled,
)
from tightlip.training.config import RunOptions

MITIGATIONS = {
    "none": {},
    "by-user": {"mitigation": "adversarial", "privacy_weight": 0.0},
    **REGULARISERS,
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

    def ready(self):
        for way in self.options.ways:
            base = self.base(way)
            for seed in self.options.seeds:
                self.prepared(way, seed, base)

    def base(self, way):
        """The model that a way starts from, which is the reference too."""
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
        out = self.work / f"corpus-{way}-{seed}"
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

    def settings(self, mitigation):
        given, options = dict(MITIGATIONS[mitigation]), self.options
        if given.get("mitigation") == "dp":
            given |= {"unit": "example", "batch_size": options.batch_size, "steps": options.steps}
            return given | {"clip_norm": options.clip_norm, "learning_rate": options.private_rate}
        given |= {"batch_size": options.plain_batch_size, "epochs": options.epochs}
        return given | {"learning_rate": options.rate}

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
                options=RunOptions(device=self.device),
                **self.settings(mitigation),
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
            "settings": self.settings(mitigation),
            "num_members": level["num_members"],
            "num_nonmembers": level["num_nonmembers"],
            "membership": {n: {f: one[f] for f in FIGURES} for n, one in scores.items()},
            "by_length": [
                {"longest": one["longest"], "ez": one["scores"]["ez"]["auc"]}
                for one in found["by_length"]
            ],
        }

    def all(self):
        """The first seed of all before the second of any."""
        for seed in self.options.seeds:
            for way, mitigation in itertools.product(self.options.ways, self.options.mitigations):
                yield self.of(way, mitigation, seed)


def table(cells):
    """Markdown: the share found at 1% and the AUC, by score, the mean over seeds with its interval."""
    names = [*next(iter(cells.known.values()))["membership"]] if cells.known else []
    yield from header("way", "mitigation", "seeds", "perplexity", *names, "EZ against none")
    groups = {}
    for (way, mitigation, seed), found in cells.known.items():
        groups.setdefault((way, mitigation), {})[seed] = found
    for (way, mitigation), found in groups.items():
        every, plain = [*found.values()], groups.get((way, "none"), {})
        shown = (
            f"{interval([found_at(one, name) for one in every])}% ({interval([auc(one, name) for one in every])})"
            for name in names
        )
        both = [seed for seed in found if mitigation != "none" and seed in plain]
        moved = [found_at(found[seed], "ez") - found_at(plain[seed], "ez") for seed in both]
        utility = interval([one["validation_perplexity"] for one in every])
        yield row(way, mitigation, len(found), utility, *shown, interval(moved) if moved else "")


def main():
    about = flags()
    about.description = __doc__
    (model,) = (one for one in about._actions if one.dest == "model")
    model.required = False
    about.add_argument("--mitigations", nargs="+", default=[*MITIGATIONS], choices=[*MITIGATIONS])
    about.add_argument("--base-documents", type=int, default=6_000)
    about.add_argument("--vocabulary", type=int, default=5_000)
    about.add_argument("--base-epochs", type=float, default=3.0)
    about.add_argument("--rate", type=float, default=2e-3)
    about.add_argument("--private-rate", type=float, default=5e-3)
    (ways,) = (one for one in about._actions if one.dest == "ways")
    ways.choices = ways.default = ("gru", "lstm")
    about.set_defaults(documents=1200, epochs=3.0, plain_batch_size=32, batch_size=256)
    options = about.parse_args()
    if options.mail is None:
        sys.exit("Give --mail.")
    logging.disable(logging.WARNING)
    go_on(Memberships, options, table)


if __name__ == "__main__":
    main()
