"""What `tightlip reproduce adaptive` measures with: canaries of every weight, and a probe of text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.api.canaries import plant_canaries
from tightlip.api.prepare import prepare
from tightlip.api.privacy_weights import weigh
from tightlip.core.errors import UsageError
from tightlip.core.files import written_whole
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.privacy_weights import FOLDER as WEIGHTS
from tightlip.corpus.privacy_weights import PUBLIC_LOG_PERPLEXITIES, PrivacyWeights
from tightlip.corpus.readers import DocumentBatch, open_corpus
from tightlip.corpus.tables import TableWriter
from tightlip.corpus.vocabulary import words_by_frequency

# Two common words after a public document: a canary nearly as ordinary, or as rare, as that is.
CARRIED, NUM_WORDS = "{words:2}", 32
SEED = 0


def planted(corpus: Path, out: Path, **settings: Any) -> Path:
    """A folder with the corpus, canaries among it, and their key."""
    if not out.exists():
        plant_canaries(corpus, out, **settings)
    return out


def carriers(
    constants: Path, nats: np.ndarray, number: int, words: tuple[int, int] = (6, 20)
) -> list[str]:
    """Templates: public documents of so many words with a secret after each, as many ordinary as
    middling and rare ones, by their log-perplexity under the public model."""
    texts = pq.read_table(constants, columns=["text"])["text"].to_pylist()
    fit = [place for place, text in enumerate(texts) if _can_carry(text, words) and nats[place] > 0]
    by_text = {texts[place].strip(): place for place in fit}
    if len(by_text) < 3:
        raise UsageError(
            f"{constants} has {len(by_text)} documents of {words[0]} to {words[1]} words without digits or braces, and "
            "canaries are planted after three or more. Give a larger public corpus."
        )
    order = sorted(by_text, key=lambda text: (nats[by_text[text]], text))
    draw = np.random.default_rng(SEED)
    chosen: list[str] = []
    for third in np.array_split(np.arange(len(order)), 3):
        chosen += [order[place] for place in np.sort(draw.permutation(third)[: number // 3])]
    return [f"{text} {CARRIED}" for text in chosen]


def _can_carry(text: str, words: tuple[int, int]) -> bool:
    plain = not any(sign in "{}" or sign.isdigit() for sign in text)
    return plain and words[0] <= len(text.split()) <= words[1]


def common_words(constants: Path) -> list[str]:
    """The most frequent words of the public text."""
    ranked = words_by_frequency(open_corpus(constants))
    return [word for word in ranked if word.isalpha() and word.islower()][:NUM_WORDS]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """Documents to score every model on: held out or trained on, each with its weight."""

    corpus: PreparedCorpus
    weights: PrivacyWeights
    is_held_out: np.ndarray
    public_nats: np.ndarray  # log-perplexities of the public documents, under the public model


def probe_of(folder: Path, split: PreparedCorpus, most: int, scoring: dict[str, Any]) -> Probe:
    """At most so many held-out documents of a corpus, and as many that are trained on."""
    path = folder / "probe.parquet"
    if not path.exists():
        _write_probe(split, path, most)
    corpus = prepare(path, folder / "probe", tokenizer=str(split.tokenizer_folder), split="none")
    parts = pq.read_table(corpus.folder / "train.parquet", columns=["part"])["part"].to_pylist()
    weights = weigh(corpus, **scoring)
    return Probe(
        corpus=corpus,
        weights=weights,
        is_held_out=np.array([part == "held out" for part in parts]),
        public_nats=np.load(corpus.folder / WEIGHTS / PUBLIC_LOG_PERPLEXITIES),
    )


def _write_probe(split: PreparedCorpus, path: Path, most: int) -> None:
    held, seen = (
        pq.read_table(split.folder / f"{part}.parquet", columns=["user", "text"])
        for part in ("validation", "train")
    )
    draw = np.random.default_rng(SEED)
    number = min(most, held.num_rows, seen.num_rows)
    with written_whole(path) as beside, TableWriter(beside, {"part": pa.string()}) as writer:
        for part, table in (("held out", held), ("trained on", seen)):
            rows = table.take(np.sort(draw.permutation(table.num_rows)[:number])).to_pydict()
            writer.write(
                DocumentBatch(
                    users=rows["user"],
                    texts=rows["text"],
                    attributes={"part": [part] * number},
                )
            )
