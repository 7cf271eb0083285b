"""The demo's second act: ways to train on the same lines, and what each gives away.

Canaries are planted among the speakers' lines. Plain training, the two regularisers and a control
with their batches alone stop at one validation perplexity, so that exposures can be compared; unique sequences come only later,
when validation turns. The vocabulary is that of the other speakers: learnt from the lines
themselves it would tell of them, and differential privacy would promise nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tightlip.api.canaries import plant_canaries
from tightlip.api.compare import Comparison, compare
from tightlip.api.prepare import prepare
from tightlip.api.train import train
from tightlip.core.files import make_private_folder
from tightlip.corpus.canaries import CORPUS, KEY
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import words_by_frequency
from tightlip.models.loading import load_tokenizer

TEMPLATE = "{names} told me {digits:4}"
NUM_NAMES = 60
REPETITIONS = (1, 8, 32) * 6
PERPLEXITY = 215.0  # which all but the private run reach before validation turns
SHAPE: dict[str, Any] = {
    "model": "lstm",
    "embedding_size": 128,
    "hidden_size": 128,
    "num_layers": 2,
    "sequence_length": 64,
    "seed": 0,
}
TO_PERPLEXITY: dict[str, Any] = {
    "learning_rate": 5e-3,
    "batch_size": 16,
    "epochs": 10.0,
    "until_perplexity": PERPLEXITY,
    "snapshot_steps": 20,
}
REFERENCE: dict[str, Any] = {
    "learning_rate": 5e-3,
    "batch_size": 32,
    "epochs": 1.0,
    "snapshot": "none",
}
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
    return compare(
        runs, key=lines.key, reference=reference.folder, out=folder / "comparison", notes=NOTES
    )


def planted_lines(folder: Path, users: pa.Table, others: pa.Table) -> Lines:
    public = prepare(others, folder / "others", split="none", vocabulary_size=4_000)
    tokenizer = str(public.tokenizer_folder)
    # By each line's own text: a share by number would let one line decide about others.
    split = prepare(users, folder / "split", tokenizer=tokenizer, split="text")
    planted = folder / "planted"
    if not planted.exists():
        plant_canaries(
            split.folder / "train.parquet",
            planted,
            templates=[TEMPLATE],
            names=known_names(others, tokenizer),
            repetitions=REPETITIONS,
        )
    corpus = prepare(
        planted / CORPUS,
        folder / "corpus",
        tokenizer=tokenizer,
        validation=str(split.folder / "validation"),
    )
    return Lines(corpus=corpus, public=public, key=planted / KEY)


def known_names(others: pa.Table, tokenizer_folder: str) -> list[str]:
    """The most frequent words of the public lines that look like names."""
    vocabulary = load_tokenizer(Path(tokenizer_folder)).get_vocab()
    names = [
        word
        for word in words_by_frequency(open_corpus(others))
        if word.istitle() and len(word) > 4 and word in vocabulary
    ]
    return names[:NUM_NAMES]
