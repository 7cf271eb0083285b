"""The corpora of the DPNR paper's experiment, each as one table with a label and private columns.

Three kinds are known: the paper's own AG file, blogs (or any table with age or gender) whose
topics LDA finds as in the paper, and the bundled plays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.core.errors import UsageError
from tightlip.corpus import bundled
from tightlip.vectors.attackers import sklearn_part
from tightlip.vectors.data import write_table

NUM_TOPICS, DOMINATING = 10, 0.8
_NUM_ENTITIES = 5
_PARTS = ("train", "dev", "test")
_BETWEEN_PARTS = "=" * 20


@dataclass(frozen=True, kw_only=True)
class PaperTask:
    """One corpus of the experiment: what is to be told from the text, and what is not."""

    name: str
    path: Path
    label: str
    private: tuple[str, ...]
    kind: str  # "entities": their presence, judged by F1; "attributes": of the writer, by accuracy
    split: str
    paper: str | None  # whose column of the paper's tables stands beside it
    about: str


def task_of(corpus: Path | None, folder: Path, seed: int = 0) -> PaperTask:
    """The task that a corpus gives; its table is made once, in `folder`."""
    if corpus is None:
        return plays_task(folder)
    with corpus.open("rb") as file:
        table = file.read(4) == b"PAR1"
    return blog_task(corpus, folder, seed) if table else ag_task(corpus, folder)


def plays_task(folder: Path) -> PaperTask:
    """The bundled plays: the kind of play as label; which play it is and who speaks, as private."""
    path = _made_once(folder / "plays.parquet", bundled.demo_speeches)
    return PaperTask(
        name="plays",
        path=path,
        label="genre",
        private=("play", "gender"),
        kind="attributes",
        split="document",
        paper=None,
        about="The bundled plays, a speech a text.",
    )


def ag_task(corpus: Path, folder: Path) -> PaperTask:
    """The paper's own AG data: topic as label, which of five persons are named as private."""
    rows = _ag_rows(corpus)
    path = _made_once(folder / "ag.parquet", lambda: _ag_table(rows))
    seen = {row[2] for row in rows if row[0] == "train"}
    again = {part: sum(row[0] == part and row[2] in seen for row in rows) for part in _PARTS[1:]}
    return PaperTask(
        name=corpus.stem,
        path=path,
        label="topic",
        private=tuple(f"entity_{number}" for number in range(1, _NUM_ENTITIES + 1)),
        kind="entities",
        split="column",
        paper="AG",
        about=f"{len(rows):,} news items in the paper's own parts; {again['dev']:,} of dev and {again['test']:,} of test "
        "also stand in train.",
    )


def _ag_rows(corpus: Path) -> list[tuple[str, str, str, frozenset[int]]]:
    """(part, label, text, entities) of each line."""
    rows, part = [], 0
    for number, line in enumerate(corpus.read_text(encoding="utf-8").split("\n"), 1):
        if line == _BETWEEN_PARTS:
            part += 1
        elif line:
            rows.append(_ag_row(corpus, number, line, part))
    if {row[0] for row in rows} != {*_PARTS}:
        raise UsageError(
            f"{corpus} is neither Parquet nor the paper's AG file: that has three parts, {_BETWEEN_PARTS} between them. "
            "Give ag_data.txt, or a table with the columns text, and age or gender."
        )
    return rows


def _ag_row(corpus: Path, number: int, line: str, part: int) -> Any:
    cells = line.split("\t")
    entities = cells[2].split() if len(cells) == 3 else ["?"]
    known = all(one.isdigit() and int(one) < _NUM_ENTITIES for one in entities)
    if not known or part >= len(_PARTS):
        raise UsageError(
            f"Line {number} of {corpus} is not: label, text, ids of the entities 0 to {_NUM_ENTITIES - 1}, with tabs "
            "between. Give the paper's ag_data.txt, or a table with the columns text, and age or gender."
        )
    return _PARTS[part], cells[0], cells[1], frozenset(int(one) for one in entities)


def _ag_table(rows: Sequence[tuple[str, str, str, frozenset[int]]]) -> pa.Table:
    columns: dict[str, list[str]] = {
        "split": [row[0] for row in rows],
        "topic": [row[1] for row in rows],
        "text": [row[2] for row in rows],
    }
    for entity in range(_NUM_ENTITIES):
        present = ["present" if entity in row[3] else "absent" for row in rows]
        columns[f"entity_{entity + 1}"] = present
    return pa.table(columns)


def blog_task(corpus: Path, folder: Path, seed: int = 0) -> PaperTask:
    """Blogs as in the paper: ten topics by LDA, posts that one of them dominates; age (under 20,
    30 and over) and gender as private."""
    names = pq.read_schema(corpus).names
    private = tuple(name for name in ("gender", "age") if name in names)
    if "text" not in names or not private:
        raise UsageError(
            f"{corpus} has the columns {', '.join(names)}: the experiment needs text, and age or gender to hide. "
            "For other columns use tightlip represent train and attack."
        )
    path = _made_once(folder / f"{corpus.stem}.parquet", lambda: _blog_table(corpus, private, seed))
    return PaperTask(
        name=corpus.stem,
        path=path,
        label="topic",
        private=private,
        kind="attributes",
        split="user" if "user" in names else "document",
        paper="BLOG",
        about=f"{pq.read_metadata(path).num_rows:,} posts that one of {NUM_TOPICS} topics of our own LDA dominates (over "
        f"{DOMINATING:.0%}), by writers under 20 or from 30 on; no writer is in two parts.",
    )


def _blog_table(corpus: Path, private: Sequence[str], seed: int) -> pa.Table:
    wanted = [*private, "text", *(["user"] if "user" in pq.read_schema(corpus).names else [])]
    table = pq.read_table(corpus, columns=wanted)
    topics, shares = _topics(table["text"].to_pylist(), seed)
    keep = shares > DOMINATING
    if "age" in private:
        ages = np.array([int(age) for age in table["age"].to_pylist()])
        keep &= (ages < 20) | (ages >= 30)
        names = np.where(ages < 20, "under 20", "30 and over")
        place = table.schema.get_field_index("age")
        table = table.set_column(place, "age", pa.array(names.tolist()))
    labels = pa.array([f"topic {topic}" for topic in topics.tolist()])
    return table.append_column("topic", labels).filter(pa.array(keep))


def _topics(texts: Sequence[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Each text's first topic and that topic's share, over the whole collection."""
    decomposition, text = sklearn_part("decomposition"), sklearn_part("feature_extraction.text")
    counts = text.CountVectorizer(max_features=10_000, stop_words="english", min_df=5)
    # The paper names neither prior nor passes. With this prior a seventh of the posts have one
    # topic; with LDA's usual 1/10, a tenth.
    lda = decomposition.LatentDirichletAllocation(
        NUM_TOPICS,
        doc_topic_prior=0.01,
        learning_method="online",
        batch_size=2_048,
        max_iter=5,
        random_state=seed,
    )
    shares = lda.fit_transform(counts.fit_transform(texts))
    return shares.argmax(axis=1), shares.max(axis=1)


def _made_once(path: Path, make: Callable[[], pa.Table]) -> Path:
    if not path.exists():
        write_table(path, make())
    return path
