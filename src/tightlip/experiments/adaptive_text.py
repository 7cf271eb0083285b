"""The text of `tightlip reproduce adaptive`: a corpus with canaries, its weights, public text beside it.

Each step is one of our own calls on a folder of its own, so that a killed command goes on.
"""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.commands import weigh
from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import written_whole
from tightlip.corpus import bundled
from tightlip.corpus.canaries import CORPUS, KEY, plant_canaries
from tightlip.corpus.prepare import PreparedCorpus, prepare
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.corpus.privacy_weights import FOLDER as WEIGHTS
from tightlip.corpus.privacy_weights import PUBLIC_LOG_PERPLEXITIES, PrivacyWeights
from tightlip.corpus.public_text import TextColumn, open_public
from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.corpus.tables import DocumentBatch, TableWriter, stored_column
from tightlip.corpus.vocabulary import words_by_frequency
from tightlip.training.config import RunOptions
from tightlip.training.run import train
from tightlip.training.weighing import name_of_model

# Two common words after a public document: a canary nearly as ordinary, or as rare, as that is.
CARRIED, NUM_WORDS = "{words:2}", 32
SEED = 0
BUNDLED, OTHERS = "shakespeare", "the lines of Shakespeare's other speakers"
IDENTITY = "My ID is {digits:6}"  # the paper's canary
HELD_OUT, PUBLIC_HELD_OUT = 0.1, 0.3
Given = str | Path | None  # somebody's corpus or model; None for ours
FEWEST_USERS = 1_000  # with fewer, noise that hides a whole user drowns everything


@dataclass(frozen=True, kw_only=True)
class AdaptiveScale:
    """How large an experiment is; the settings are those of TrainConfig.

    `shape` is every model's, `plain` trains without noise, `private` with it, `public` the model
    that stands for the large public one where none is given. `carrier_words` is how long a public
    document may be that a canary is planted after: about as long as most, and with room in a row
    for the canary. `bf16` and `physical_rows` are for a GPU.
    """

    name: str
    shape: dict[str, Any]
    plain: dict[str, Any]
    private: dict[str, Any]
    public: dict[str, Any]
    vocabulary_size: int
    most_documents: int | None = None
    most_probed: int = 2_000
    repetitions: tuple[int, ...] = (10, 100, 1000)
    num_carriers: int = 24
    carrier_repetitions: int = 30
    carrier_words: tuple[int, int] = (6, 20)
    noise_multipliers: tuple[float, ...] = (1.0, 5.0)
    bf16: bool = False
    physical_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class PublicSide:
    """Text that nobody minds, a tokenizer made of it, and a model that scores by it."""

    tokenizer: Path
    model: Path
    constants: Path  # documents that the model was not trained on, for the weights' constants
    model_words: str
    corpus_words: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """Documents to score every model on: held out or trained on, each with its weight."""

    corpus: PreparedCorpus
    weights: PrivacyWeights
    is_held_out: np.ndarray
    public_nats: np.ndarray  # log-perplexities of the public documents, under the public model


@dataclass(frozen=True, kw_only=True, eq=False)
class PlantedCorpus:
    """What the runs on one corpus share: the text with canaries in it, weighed, and a probe."""

    name: str
    unit: str
    num_users: int | None
    num_units: int
    corpus: PreparedCorpus
    weights: PrivacyWeights
    probe: Probe
    keys: tuple[Path, Path]  # of the paper's canary, and of those after public documents


def public_side(
    folder: Path, corpus: Given, model: Given, scale: AdaptiveScale, options: RunOptions
) -> PublicSide:
    """The public text, cut into pieces of words; without a model, an LSTM trained on most of it."""
    words = OTHERS if corpus is None else Path(corpus).name
    path = copied(source_of(corpus, public=True), folder / "public.parquet", scale.most_documents)
    prepared = prepare(
        path,
        folder / "public",
        split="text",
        holdout=PUBLIC_HELD_OUT,
        vocabulary="bpe",
        vocabulary_size=scale.vocabulary_size,
    )
    if model is not None:
        used, constants, model_words = Path(model), path, name_of_model(Path(model))
    else:
        to = folder / "public-model"
        used = train(prepared, to, options=options, snapshot="none", **scale.public).folder
        constants = prepared.folder / "validation.parquet"
        model_words = f"a small {scale.public['model'].upper()} trained here on {words}"
    return PublicSide(
        tokenizer=prepared.tokenizer_folder,
        model=used,
        constants=constants,
        model_words=model_words,
        corpus_words=words,
    )


def planted_corpus(
    folder: Path, given: Given, public: PublicSide, scale: AdaptiveScale, unit: str, device: str
) -> PlantedCorpus:
    """One corpus made ready: held-out text apart, canaries planted, every document weighed."""
    name = BUNDLED if given is None else Path(given).stem
    source = source_of(given, public=False)
    folder = folder / name
    path = copied(source, folder / "source.parquet", scale.most_documents)
    tokenizer = str(public.tokenizer)
    split = prepare(path, folder / "split", tokenizer=tokenizer, split="text", holdout=HELD_OUT)
    scoring: dict[str, Any] = {"public_model": public.model, "public_corpus": public.constants}
    scoring |= {"device": device}
    probe = probe_of(folder, split, scale.most_probed, scoring)
    once = {"templates": [IDENTITY], "repetitions": scale.repetitions, "seed": SEED}
    ids = plant_once(split.folder / "train.parquet", folder / "ids", **once)
    carrying = (probe.public_nats, scale.num_carriers, scale.carrier_words)
    carried = plant_once(
        ids / CORPUS,
        folder / "carried",
        templates=carriers(public.constants, *carrying),
        words=common_words(public.constants),
        repetitions=(scale.carrier_repetitions,),
        seed=SEED + 1,  # with the same, both kinds would hide the same draws
    )
    held_out = str(split.folder / "validation")
    corpus = prepare(carried / CORPUS, folder / "corpus", tokenizer=tokenizer, validation=held_out)
    num_users = None if isinstance(source, TextColumn) else corpus.train.num_users
    unit = chosen_unit(unit, num_users)
    return PlantedCorpus(
        name=name,
        unit=unit,
        num_users=num_users,
        num_units=corpus.train.num_documents if unit == "example" else corpus.train.num_users,
        corpus=corpus,
        weights=weigh(corpus, **scoring),
        probe=probe,
        keys=(ids / KEY, carried / KEY),
    )


def chosen_unit(asked: str, num_users: int | None) -> str:
    """Whom the private runs protect: a user where there are enough of them, else an example."""
    if asked == "user" and num_users is None:
        raise UsageError(
            "unit='user' needs to know who wrote what, and the corpus has no column user. Give one, or use --unit example."
        )
    if asked != "auto":
        return asked
    return "user" if (num_users or 0) >= FEWEST_USERS else "example"


def source_of(given: Given, *, public: bool) -> Corpus | TextColumn:
    """A corpus; without a file, the lines of Shakespeare's speakers, of one in three as public."""
    if given is None:
        return open_corpus(_speakers(public=public))
    return open_public(Path(given), **ColumnSettings().tree())


def _speakers(*, public: bool) -> pa.Table:
    """Every third speaker is public, so that either side has talkative and quiet ones."""
    table = bundled.demo_corpus()
    speakers = list(dict.fromkeys(table["user"].to_pylist()))
    chosen = {user for number, user in enumerate(speakers) if (number % 3 == 0) == public}
    return table.filter(pa.array([user in chosen for user in table["user"].to_pylist()]))


def copied(source: Corpus | TextColumn, path: Path, most: int | None) -> Path:
    """The documents with words, or some `most` of them, as user and text.

    Whether one is kept, and the name of a writer that nobody knows, follow from its own text
    alone: by number, one document more would decide about others.
    """
    if path.exists():
        return path
    number = sum(bool(text.split()) for batch in source.batches() for text in batch.texts)
    share = 1.0 if most is None else min(1.0, most / max(1, number))
    nameless = isinstance(source, TextColumn)
    with written_whole(path) as beside, TableWriter(beside, {}) as writer:
        for batch in source.batches():
            rows = [
                (f"text {_digest(text):032x}" if nameless else user, text)
                for user, text in zip(batch.users, batch.texts, strict=True)
                if text.split() and _digest(text) < share * 2**128
            ]
            users, texts = ([row[place] for row in rows] for place in (0, 1))
            writer.write(DocumentBatch(users=users, texts=texts))
    return path


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=16).digest(), "big")


def plant_once(corpus: Path, out: Path, **settings: Any) -> Path:
    """A folder with the corpus, canaries among it, and their key."""
    if not out.exists():
        plant_canaries(corpus, out, **settings)
    return out


def carriers(
    constants: Path, nats: np.ndarray, number: int, words: tuple[int, int] = (6, 20)
) -> list[str]:
    """Templates: public documents of so many words with a secret after each, as many ordinary as
    middling and rare ones, by their log-perplexity under the public model."""
    texts = stored_column(constants, "text")
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


def probe_of(folder: Path, split: PreparedCorpus, most: int, scoring: dict[str, Any]) -> Probe:
    """At most so many held-out documents of a corpus, and as many that are trained on."""
    path = folder / "probe.parquet"
    if not path.exists():
        _write_probe(split, path, most)
    corpus = prepare(path, folder / "probe", tokenizer=str(split.tokenizer_folder), split="none")
    parts = stored_column(corpus.folder / "train.parquet", "part")
    return Probe(
        corpus=corpus,
        weights=weigh(corpus, **scoring),
        is_held_out=np.array([part == "held out" for part in parts]),
        public_nats=np.load(checked(corpus.folder / WEIGHTS / PUBLIC_LOG_PERPLEXITIES)),
    )


def _write_probe(split: PreparedCorpus, path: Path, most: int) -> None:
    held, seen = (
        pq.read_table(checked(split.folder / f"{part}.parquet"), columns=["user", "text"])
        for part in ("validation", "train")
    )
    draw = np.random.default_rng(SEED)
    number = min(most, held.num_rows, seen.num_rows)
    with written_whole(path) as beside, TableWriter(beside, {"part": pa.string()}) as writer:
        for part, table in (("held out", held), ("trained on", seen)):
            rows = table.take(np.sort(draw.permutation(table.num_rows)[:number])).to_pydict()
            of = {"part": [part] * number}
            writer.write(DocumentBatch(users=rows["user"], texts=rows["text"], attributes=of))
