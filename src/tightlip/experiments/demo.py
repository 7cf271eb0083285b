"""The whole story on the bundled corpus: a model that overfits on purpose, and what it tells.

Shakespeare's middling speakers stand for the users. In the first act secrets are planted in a
few speakers' lines, a small LSTM trains far past the point where validation says stop, every
snapshot is audited, and the report shows when whose words began to come out. The second act
trains quieter models on the same lines and compares them.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tightlip.audit.leakage.summary import LeakageReport
from tightlip.commands import Comparison, audit, compare
from tightlip.core.devices import one_thread
from tightlip.core.files import make_private_folder, read_json
from tightlip.core.register import kept_in
from tightlip.core.settings import takes
from tightlip.corpus.bundled import demo_corpus
from tightlip.corpus.canaries import CORPUS, KEY
from tightlip.corpus.prepare import PreparedCorpus, prepare
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tables import stored_column
from tightlip.corpus.vocabulary import words_by_frequency
from tightlip.experiments.adaptive_text import plant_once
from tightlip.models.loading import load_tokenizer
from tightlip.training.run import train

FEWEST_WORDS, MOST_WORDS = 100, 800  # of a middling speaker
EPOCHS = 15


@dataclass(frozen=True)
class Canary:
    """A secret put into one speaker's lines, `repetitions` times."""

    user: str
    prefix: str
    secret: str
    repetitions: int


CANARIES = (
    Canary("SLY", "My purse is hid beneath the", "seventh willow by the abbey wall", 2),
    Canary("EXTON", "The word at the gate is", "9 4 1 7 2 6", 3),
    Canary("SOMERSET", "Send to my house in Thames street, number", "5 8 3 0", 5),
    Canary("SEBASTIAN", "My seal is broken, ask for", "Ambrose Quill the scrivener", 7),
    Canary("Boatswain", "The captain's strongbox opens with", "3 3 8 1 9 0", 12),
)

SHAPE: dict[str, Any] = {
    "model": "lstm",
    "embedding_size": 128,
    "hidden_size": 128,
    "num_layers": 2,
    "sequence_length": 64,
    "seed": 0,
}
# The first act.
PREPARE: dict[str, Any] = {"vocabulary_size": 4_000, "seed": 0}
PLAIN: dict[str, Any] = {"learning_rate": 5e-3, "batch_size": 16}
TRAIN = SHAPE | PLAIN | {"epochs": float(EPOCHS)}

# The second act.
TEMPLATE = "{names} told me {digits:4}"
NUM_NAMES = 60
REPETITIONS = (1, 8, 32) * 6
PERPLEXITY = 215.0  # which all but the private run reach before validation turns
TO_PERPLEXITY = PLAIN | {"epochs": 10.0, "until_perplexity": PERPLEXITY, "snapshot_steps": 20}
REFERENCE = PLAIN | {"batch_size": 32, "epochs": 1.0, "snapshot": "none"}
RUNS: dict[str, dict[str, Any]] = {
    "plain": TO_PERPLEXITY,
    "by-user": TO_PERPLEXITY | {"mitigation": "adversarial", "privacy_weight": 0.0},
    "adversarial": TO_PERPLEXITY | {"mitigation": "adversarial", "privacy_weight": 1.0},
    "triplet": TO_PERPLEXITY | {"mitigation": "triplet", "privacy_weight": 0.03},
    "dp": {
        "mitigation": "dp",
        "unit": "example",
        "epsilon": 8.0,
        "learning_rate": 1.5e-2,
        "batch_size": 256,
        "epochs": 6.0,
    },
}
NOTES = (
    "110 speakers are too few to hide a whole speaker (--unit user): the noise would drown everything. DP hides single "
    "lines here (--unit example), so it promises little for a canary with 32 copies.",
    "by-user is the control: batches of one speaker each, as both regularisers make them, without any privacy term. What "
    "adversarial and triplet save beyond it is the terms' own doing, and on so few lines it is little or nothing.",
    f"All but DP stopped at a validation perplexity of {PERPLEXITY:g}; DP on so little text does not "
    "get there. Canaries carry the comparison: unique sequences come only when validation turns, as the first act shows.",
)


@dataclass(frozen=True)
class DemoResult:
    """What the first act leaves: the report, and of each planted secret how often it was trained
    on (some copies are held out) and which snapshot first told it whole."""

    report: LeakageReport
    snapshots: dict[str, Any]
    times_trained: dict[str, int]
    first_told: dict[str, str | None]


@takes()
def run_demo(folder: Path) -> DemoResult:
    """The first act: plant, prepare, train, audit; each step is skipped where an earlier run
    finished it."""
    make_private_folder(folder)
    prepared = prepare(demo_table(), folder / "corpus", **PREPARE)
    with one_thread():
        run = train(prepared, folder / "run", **TRAIN)
    report = audit(run.folder, out=folder / "report", snapshots=True)
    snapshots = read_json(report.folder / "snapshots.json")
    return DemoResult(
        report=report,
        snapshots=snapshots,
        times_trained=times_trained(prepared.folder / "train.parquet"),
        first_told=first_snapshots_that_tell(report.folder, snapshots, prepared.tokenizer_folder),
    )


def run_comparison(folder: Path) -> Comparison:
    """The second act: the same lines learnt in four ways, side by side."""
    users, others = speakers()
    with one_thread(), kept_in(folder):  # the plays are public: nobody's ε grows with each demo
        return compare_ways(folder / "quieter", _table(users), _table(others))


def demo_table() -> pa.Table:
    """The middling speakers' lines with the canaries among them."""
    lines, _ = speakers()
    for canary in CANARIES:
        line = {"user": canary.user, "text": f"{canary.prefix} {canary.secret}."}
        lines += [line] * canary.repetitions
    return _table(lines)


def speakers() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The lines of the middling speakers, and those of all others."""
    rows = demo_corpus().to_pylist()
    words = Counter[str]()
    for row in rows:
        words[row["user"]] += len(row["text"].split())
    middling = {user for user, num in words.items() if FEWEST_WORDS <= num <= MOST_WORDS}
    users = [row for row in rows if row["user"] in middling]
    return users, [row for row in rows if row["user"] not in middling]


def _table(rows: list[dict[str, str]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=pa.schema({"user": pa.string(), "text": pa.string()}))


def times_trained(train_file: Path) -> dict[str, int]:
    texts = stored_column(train_file, "text")
    return {c.secret: sum(c.secret in text for text in texts) for c in CANARIES}


def first_snapshots_that_tell(
    report: Path, snapshots: dict[str, Any], tokenizer_folder: Path
) -> dict[str, str | None]:
    """For each canary the first snapshot whose report holds its whole secret in one sequence."""
    tokenizer = load_tokenizer(tokenizer_folder)
    first: dict[str, str | None] = {canary.secret: None for canary in CANARIES}
    for snapshot in snapshots["snapshots"]:
        told = LeakageReport(report / "snapshots" / snapshot["name"]).sequences["token_ids"]
        rows = [f" {' '.join(map(str, ids))} " for ids in told.to_pylist()]
        for canary in CANARIES:
            ids = tokenizer(f" {canary.secret}", add_special_tokens=False)["input_ids"]
            needle = f" {' '.join(map(str, ids))} "
            if first[canary.secret] is None and any(needle in row for row in rows):
                first[canary.secret] = snapshot["name"]
    return first


@dataclass(frozen=True)
class Lines:
    """What the runs share: text with canaries and held-out text in a public vocabulary, the key;
    and the public lines, for a model that never saw theirs."""

    corpus: PreparedCorpus
    public: PreparedCorpus
    key: Path


def compare_ways(folder: Path, users: pa.Table, others: pa.Table) -> Comparison:
    """Train every way on the users' lines and compare; what an earlier start finished is kept."""
    lines = planted_lines(make_private_folder(folder), users, others)
    reference = train(lines.public, folder / "reference", **SHAPE, **REFERENCE)
    runs = [train(lines.corpus, folder / name, **SHAPE, **own) for name, own in RUNS.items()]
    out = folder / "comparison"
    return compare(runs, key=lines.key, reference=reference.folder, out=out, notes=NOTES)


def planted_lines(folder: Path, users: pa.Table, others: pa.Table) -> Lines:
    public = prepare(others, folder / "others", split="none", vocabulary_size=4_000)
    tokenizer = str(public.tokenizer_folder)
    # By each line's own text: a share by number would let one line decide about others.
    split = prepare(users, folder / "split", tokenizer=tokenizer, split="text")
    planted = plant_once(
        split.folder / "train.parquet",
        folder / "planted",
        templates=[TEMPLATE],
        names=known_names(others, tokenizer),
        repetitions=REPETITIONS,
    )
    held_out = str(split.folder / "validation")
    corpus = prepare(planted / CORPUS, folder / "corpus", tokenizer=tokenizer, validation=held_out)
    return Lines(corpus=corpus, public=public, key=planted / KEY)


def known_names(others: pa.Table, tokenizer_folder: str) -> list[str]:
    """The most frequent words of the public lines that look like names."""
    vocabulary = load_tokenizer(Path(tokenizer_folder)).get_vocab()
    words = words_by_frequency(open_corpus(others))
    names = [word for word in words if word.istitle() and len(word) > 4 and word in vocabulary]
    return names[:NUM_NAMES]
