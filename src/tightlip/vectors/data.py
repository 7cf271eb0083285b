"""Texts with a label and private attributes, split 8:1:1 into train, dev and test."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import damage_in_words, store_address, written_whole
from tightlip.core.run_folder import CONFIG
from tightlip.core.settings import read_toml
from tightlip.corpus.bundled import demo_speeches
from tightlip.corpus.formats import columns_of, kind_of, rows_of
from tightlip.corpus.owners import columns_there
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.vectors.categories import LEFT_OUT, Categories, categories, span_of
from tightlip.vectors.settings import RepresentSettings

BUNDLED = "bundled"
PARTS = ("train", "dev", "test")
SPLIT, CORPUS = "split.parquet", "corpus.parquet"
_ENDS = (0.8, 0.9)  # shares of the texts at which train and dev end


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The texts to learn from, in corpus order; `rows` are their places in the corpus."""

    texts: list[str]
    users: list[str] | None
    rows: np.ndarray
    label: Categories
    private: dict[str, Categories]
    parts: np.ndarray
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, name: str) -> "Examples":
        """Only the texts of train, dev or test."""
        return self.chosen(np.flatnonzero(self.parts == name))

    def in_train(self, keys: list[str]) -> np.ndarray:
        """Of which test texts the key, such as their user, is that of a training text too."""
        trained = {keys[place] for place in np.flatnonzero(self.parts == "train")}
        tested = np.flatnonzero(self.parts == "test")
        return np.asarray([keys[place] in trained for place in tested], dtype=bool)

    def seen_in_train(self) -> np.ndarray:
        """Which test texts read as a training text does; case and white space make no difference."""
        return self.in_train([reading_of(text) for text in self.texts])

    def chosen(self, places: np.ndarray) -> "Examples":
        return replace(
            self,
            texts=[self.texts[place] for place in places],
            users=None if self.users is None else [self.users[place] for place in places],
            rows=self.rows[places],
            label=self.label.chosen(places),
            private={name: column.chosen(places) for name, column in self.private.items()},
            parts=self.parts[places],
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the texts come from and how they are read; `has_users` where a column says whose."""

    corpus: Corpus
    has_users: bool
    tree: dict[str, Any]


def open_source(source: Any, **settings: Any) -> Source:
    """The corpus in a file, a folder or a table; the name `bundled` is the plays that come along.

    A corpus without users is read too. `settings` are those of ColumnSettings.
    """
    columns = ColumnSettings(**settings)
    path, given = None, source
    if isinstance(source, str | Path) and str(source) == BUNDLED and not Path(BUNDLED).exists():
        path, given = BUNDLED, demo_speeches()
    elif isinstance(source, str | Path):
        path = store_address(source) or str(Path(source).resolve())
    if not (has_users := _has_users(given, columns.user_column)):
        given = _with_nobody(given, columns.user_column, columns.text_column)
    corpus = open_corpus(given, **columns.tree())
    tree = {"path": path, "fingerprint": corpus.fingerprint(), **columns.tree()}
    return Source(corpus=corpus, has_users=has_users, tree=tree)


def _has_users(source: Any, column: str) -> bool:
    if isinstance(source, pa.Table):
        return column in source.schema.names
    if isinstance(source, list | tuple):
        return not source or not isinstance(source[0], dict) or column in source[0]
    if not isinstance(source, str | Path):
        return column in getattr(source, "columns", [column])
    path = Path(source)
    if not path.is_file() or kind_of(path) is None or not path.stat().st_size:
        return True  # whoever opens it says what is wrong
    if (schema := columns_of(path)) is not None:
        return column in schema.names
    _, first = next(rows_of(path), (0, {column: ""}))
    return not isinstance(first, dict) or column in first


def _with_nobody(source: Any, column: str, text_column: str) -> Any:
    """The rows with an empty user in each."""
    if isinstance(source, pa.Table):
        return source.append_column(column, pa.array([""] * source.num_rows))
    if isinstance(source, list | tuple):
        return [{column: "", **row} if isinstance(row, dict) else row for row in source]
    if not isinstance(source, str | Path):
        return source.assign(**{column: ""})
    if kind_of(Path(source)) == "parquet":
        return _with_nobody(pq.read_table(source), column, text_column)
    rows = [row for _, row in rows_of(Path(source))]
    first = rows[0] if rows and isinstance(rows[0], dict) else {text_column: ""}
    if kind_of(Path(source)) == "csv" and text_column not in first:
        there = columns_there(first, is_csv=True)
        raise UsageError(f"{source} has no column {text_column!r}. {there}")
    return [{**row, column: ""} if isinstance(row, dict) else row for row in rows]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A corpus in memory: its texts, whose they are where that is known, and some columns."""

    texts: list[str]
    users: list[str] | None
    named: dict[str, list[Any]]


def read_columns(source: Source, wanted: Sequence[str]) -> Columns:
    """The texts of a corpus and the columns asked for; one that is not there is refused."""
    user_column = source.tree["user_column"]
    texts: list[str] = []
    users: list[str] = []
    named: dict[str, list[Any]] = {name: [] for name in wanted}
    there: dict[str, None] = {user_column: None} if source.has_users else {}
    for batch in source.corpus.batches():
        texts += batch.texts
        users += batch.users
        there |= dict.fromkeys(batch.attributes)
        for name, values in named.items():
            # Who wrote it may be just what nobody should tell.
            own = batch.users if name == user_column else batch.attributes.get(name)
            values += own or [None] * len(batch)
    if missing := [name for name in wanted if name not in there]:
        raise UsageError(
            f"{source.corpus.name} has no column {missing[0]!r}. {columns_there(there, missing[0])}"
        )
    return Columns(texts=texts, users=users if source.has_users else None, named=named)


def read_examples(source: Source, settings: RepresentSettings) -> Examples:
    """All texts that have a label and every private attribute, and the part each is in.

    Holds:
        dropped: a row without a label (null, blank, NaN), or outside the bins, is left out and counted.
        eight_one_one: train, dev and test have 8, 1 and 1 of 10 texts, up to groups that stay whole.
        together: texts that read the same (see `reading_of`), or of one user, are in one part.
    """
    wanted = [settings.label, *settings.private]
    by_column = [settings.split_column] if settings.split == "column" else []
    read = read_columns(source, [*wanted, *by_column])
    attributes, bins = read.named, dict(cut.split("=", 1) for cut in settings.bins)
    classes = {name: categories(attributes[name], name, bins.get(name)) for name in wanted}
    kept = np.flatnonzero(np.all([column.ids != LEFT_OUT for column in classes.values()], axis=0))
    if not len(kept):
        raise UsageError(_why_none(classes, attributes, bins))
    total = len(read.texts)
    every = Examples(
        texts=read.texts,
        users=read.users,
        rows=np.arange(total),
        label=classes.pop(settings.label),
        private=classes,
        parts=np.full(total, ""),
        num_dropped=total - len(kept),
    )
    examples = every.chosen(kept)
    given = [attributes[name][row] for name in by_column for row in kept]
    examples = replace(examples, parts=parts_of(examples, settings, given))
    _check_usable(examples, settings)
    return examples


def _why_none(
    classes: dict[str, Categories], attributes: dict[str, list[Any]], bins: dict[str, str]
) -> str:
    """Which column is to blame where no row is left."""
    for name, column in classes.items():
        if (column.ids != LEFT_OUT).any():
            continue
        total, span = len(column.ids), span_of(attributes[name])
        if name in bins and span is not None:
            return (
                f"bins={name}={bins[name]} keeps none of the {total} rows: the numbers run from {span[0]:g} to "
                f"{span[1]:g}. Choose ranges among them."
            )
        return f"Column {name!r} is empty in all {total} rows. Name another column."
    total = len(next(iter(classes.values())).ids)
    return f"None of the {total} rows has all of {', '.join(classes)}. Name fewer columns, or look at --bins."


def parts_of(examples: Examples, settings: RepresentSettings, given: list[Any]) -> np.ndarray:
    """Each text's part: as `given` by a column, or by a keyed hash of what must stay together."""
    if settings.split == "column":
        if odd := sorted({str(part) for part in given} - {*PARTS}):
            raise UsageError(
                f"Column {settings.split_column!r} says {odd[0]!r}, which is no part. It must say train, dev or test."
            )
        return np.array(given)
    if settings.split == "user" and examples.users is None:
        raise UsageError(
            "split='user' keeps each user's texts together, and the corpus has no users. Name the column with "
            "--user-column, or use --split document."
        )
    keys = _spellings(examples.texts) if settings.split == "document" else examples.users
    assert keys is not None
    part_of = _assigned(Counter(keys), settings.split_seed)
    return np.array([part_of[key] for key in keys])


def reading_of(text: str) -> str:
    """What a text reads as: case and white space make no difference.

    >>> reading_of(" To  be,  OR not ")
    'to be, or not'
    """
    return " ".join(text.split()).casefold()


def _spellings(texts: list[str]) -> list[str]:
    """For each text, one of those that read as it does, the same for all of them.

    A text that nothing else reads like stands for itself, however it is spelt.
    """
    first: dict[str, str] = {}
    readings = [reading_of(text) for text in texts]
    for reading, text in zip(readings, texts, strict=True):
        first[reading] = min(first.get(reading, text), text)
    return [first[reading] for reading in readings]


def _assigned(sizes: Mapping[str, int], seed: int) -> dict[str, str]:
    """Each group's part: in an order that the seed decides, until each part has its share."""

    def place(key: str) -> bytes:
        return blake2b(key.encode(), digest_size=16, key=str(seed).encode()).digest()

    total, before, part_of = sum(sizes.values()), 0, {}
    for key in sorted(sizes, key=place):
        part_of[key] = PARTS[bisect_right(_ENDS, before / total + 1e-12)]
        before += sizes[key]
    return part_of


def _check_usable(examples: Examples, settings: RepresentSettings) -> None:
    for name, column in {settings.label: examples.label, **examples.private}.items():
        if len(set(column.ids.tolist())) < 2:
            raise UsageError(
                f"Column {name!r} has one value in all {len(examples)} texts left, so nothing can be told. Name another "
                "column, or look at --bins."
            )
    for part in PARTS:
        if not (examples.parts == part).any():
            raise UsageError(
                f"The {len(examples)} texts left none to {part}. Give more texts, or, with --split user, more users."
            )


def write_split(path: Path, examples: Examples) -> None:
    write_table(path, pa.table({"row": examples.rows, "part": pa.array(examples.parts.tolist())}))


def write_corpus(path: Path, source: Source) -> None:
    """Keep a corpus that lay in memory with the run that it trains."""
    user_column, text_column = source.tree["user_column"], source.tree["text_column"]
    rows = []
    for batch in source.corpus.batches():
        columns = batch.attributes | {text_column: batch.texts}
        columns |= {user_column: batch.users} if source.has_users else {}
        by_row = zip(*columns.values(), strict=True)
        rows += [dict(zip(columns, row, strict=True)) for row in by_row]
    write_table(path, pa.Table.from_pylist(rows))


def write_table(path: Path, table: pa.Table, *, alone: bool = False, **options: Any) -> None:
    """Write a Parquet file whole or not at all."""
    with written_whole(path, alone=alone) as beside:
        pq.write_table(table, beside, compression="zstd", **options)


def load_examples(run: Path | str) -> Examples:
    """The texts, attributes and parts that a run was trained with, read again.

    Holds:
        same: a corpus that changed since is a usage error.
        split: a finished run's texts are in the parts that it was trained with.
    """
    run = Path(run)
    if not (run / CONFIG).is_file():
        raise UsageError(
            f"{run} is not a tightlip run (no {CONFIG}). Run: tightlip represent train CORPUS --out {run}"
        )
    config = read_toml(run / CONFIG)
    if "represent" not in config:
        raise UsageError(f"{run} is a run of something else than `tightlip represent train`.")
    settings = RepresentSettings.from_tree(config["represent"], str(run / CONFIG))
    source, tree = source_of_run(run), config["corpus"]
    if tree.get("path") and source.tree["fingerprint"] != tree["fingerprint"]:
        raise UsageError(
            f"{tree['path']} is not what {run} was trained on: it changed since. Put the old file back, or train again."
        )
    return _as_trained(run, read_examples(source, settings))


def source_of_run(run: Path) -> Source:
    """The corpus that a run was trained with, opened again."""
    tree = read_toml(run / CONFIG)["corpus"]
    columns = {name: tree[name] for name in ("user_column", "text_column", "bad_rows")}
    return open_source(tree.get("path") or run / CORPUS, **columns)


def columns_of_run(run: Path, names: Sequence[str], examples: Examples) -> dict[str, list[Any]]:
    """Further columns of a run's corpus, for the texts it uses."""
    named = read_columns(source_of_run(run), names).named if names else {}
    return {name: [cells[row] for row in examples.rows] for name, cells in named.items()}


def _as_trained(run: Path, examples: Examples) -> Examples:
    """In the parts that split.parquet has, where the training is finished."""
    if not (run / SPLIT).is_file():
        return examples
    with damage_in_words(run / SPLIT):
        split = pq.read_table(checked(run / SPLIT))
        rows, parts = split["row"].to_pylist(), split["part"].to_pylist()
    if rows != examples.rows.tolist():
        raise UsageError(
            f"{run} was trained on other rows of its corpus than are read now: an earlier version of tightlip left out "
            "others. Train again, with another --out."
        )
    return replace(examples, parts=np.array(parts))
