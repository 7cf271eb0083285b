"""`tightlip reproduce representation` as one call: Lyu, He and Li 2020 on their data or yours.

Every way of training over several seeds, each attacked afresh: the paper's tables 2 to 7 with
its figures beside ours, and what its ε promises of a whole vector. Three kinds of corpora are
known: the paper's own AG file, blogs (or any table with age or gender) whose topics LDA finds as in
the paper, and the bundled plays; each becomes one table with a label and private columns.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tightlip
from tightlip.commands import represent_attack
from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files
from tightlip.core.progress import task
from tightlip.core.settings import takes
from tightlip.corpus import bundled
from tightlip.experiments import Reproduced, claim_folder, scale_named, write_results
from tightlip.experiments.vectors_page import csv_text
from tightlip.report.kit import write_page
from tightlip.vectors.attackers import sklearn_part
from tightlip.vectors.data import PARTS, write_table
from tightlip.vectors.run import RepresentRuns, over_seeds, represent_train
from tightlip.vectors.settings import RepresentOptions

ATTACKS = "attacks.html"
ONE_RELEASE = ("mlp", "logistic", "trees")
NUM_TOPICS, DOMINATING = 10, 0.8
_TOLD = ("name", "kind", "paper", "about", "label")  # of a task, in the result
_NUM_ENTITIES = 5
_BETWEEN_PARTS = "=" * 20


@dataclass(frozen=True, kw_only=True)
class PaperTask:
    """One corpus of the experiment: what is to be told from the text, and what is not."""

    name: str
    path: Path
    label: str
    private: tuple[str, ...]
    about: str
    kind: str = "attributes"  # of the writer, judged by accuracy; "entities": their presence, by F1
    split: str = "document"
    paper: str | None = None  # whose column of the paper's tables stands beside it


def task_of(corpus: Path | None, folder: Path, seed: int = 0) -> PaperTask:
    """The task that a corpus gives; its table is made once, in `folder`."""
    if corpus is None:
        return plays_task(folder)
    with corpus.open("rb") as file:
        table = file.read(4) == b"PAR1"
    return blog_task(corpus, folder, seed) if table else ag_task(corpus, folder)


def plays_task(folder: Path) -> PaperTask:
    """The bundled plays: the kind of play as label; which play it is and who speaks, as private."""
    return PaperTask(
        name="plays",
        path=_made_once(folder / "plays.parquet", bundled.demo_speeches),
        label="genre",
        private=("play", "gender"),
        about="The bundled plays, a speech a text.",
    )


def ag_task(corpus: Path, folder: Path) -> PaperTask:
    """The paper's own AG data: topic as label, which of five persons are named as private."""
    rows = _ag_rows(corpus)
    seen = {row[2] for row in rows if row[0] == "train"}
    again = {part: sum(row[0] == part and row[2] in seen for row in rows) for part in PARTS[1:]}
    return PaperTask(
        name=corpus.stem,
        path=_made_once(folder / "ag.parquet", lambda: _ag_table(rows)),
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
    if {row[0] for row in rows} != {*PARTS}:
        raise UsageError(
            f"{corpus} is neither Parquet nor the paper's AG file: that has three parts, {_BETWEEN_PARTS} between them. "
            "Give ag_data.txt, or a table with the columns text, and age or gender."
        )
    return rows


def _ag_row(corpus: Path, number: int, line: str, part: int) -> Any:
    cells = line.split("\t")
    entities = cells[2].split() if len(cells) == 3 else ["?"]
    known = all(one.isdigit() and int(one) < _NUM_ENTITIES for one in entities)
    if not known or part >= len(PARTS):
        raise UsageError(
            f"Line {number} of {corpus} is not: label, text, ids of the entities 0 to {_NUM_ENTITIES - 1}, with tabs "
            "between. Give the paper's ag_data.txt, or a table with the columns text, and age or gender."
        )
    return PARTS[part], cells[0], cells[1], frozenset(int(one) for one in entities)


def _ag_table(rows: Sequence[tuple[str, str, str, frozenset[int]]]) -> pa.Table:
    *texts, named = zip(*rows, strict=True)
    columns = dict(zip(("split", "topic", "text"), map(list, texts), strict=True))
    for entity in range(_NUM_ENTITIES):
        present = ["present" if entity in ids else "absent" for ids in named]
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


@dataclass(frozen=True, kw_only=True)
class TablesScale:
    """How much of the experiment is run."""

    name: str
    num_seeds: int
    epsilons: tuple[float, ...]
    dropouts: tuple[float, ...]
    calibrated: tuple[float, ...]  # ε of the whole vector, for the mechanisms that mean it
    attackers: tuple[str, ...]
    training: dict[str, Any]


_SMOKE = TablesScale(
    name="smoke",
    num_seeds=1,
    epsilons=(0.05, 1.0, 5.0),
    dropouts=(0.5,),
    calibrated=(8.0,),
    attackers=("mlp", "logistic"),
    training={},
)
_SMALL = replace(
    _SMOKE,
    name="small",
    num_seeds=2,
    epsilons=(0.05, 0.1, 0.5, 1.0, 5.0),  # the paper's, like the shares of masked words
    dropouts=(0.1, 0.3, 0.5, 0.8),
    attackers=ONE_RELEASE,
)
_PAPER = replace(
    _SMALL, name="paper", num_seeds=5, attackers=(*ONE_RELEASE, "averaged"), training={"epochs": 4}
)
SCALES = {scale.name: scale for scale in (_SMOKE, _SMALL, _PAPER)}


@takes()
def reproduce_representation(
    corpus: Sequence[str | Path] = (),
    *,
    extractor: str = "bag",
    scale: str = "smoke",
    out: str | Path = "reproduce-representation",
    device: str = "auto",
    bf16: bool = False,
) -> Reproduced:
    """Run the experiment on each corpus and write OUT/representation.json, .csv and .html.

    A corpus is the paper's ag_data.txt, or a Parquet table with text, and age or gender; without
    any it is the bundled plays. `extractor` is bag, lstm or the folder of an encoder.

    Holds:
        resumed: what an earlier start finished is kept, run by run and attack by attack.
        silent: no text and nobody's name is in the result.
    """
    size, given = scale_named(scale, SCALES), [Path(each) for each in corpus]
    for path in given:
        if not path.is_file():
            raise UsageError(f"{path} is not a file. Nothing is downloaded: give a path on disk.")
    text = digest_of_files(given) if given else None
    folder = claim_folder(Path(out), size, given, text=text, extractor=extractor)
    options = RepresentOptions(device=device, bf16=bf16)
    tasks = [task_of(each, folder) for each in given or (None,)]
    sections = [_Runs(one, folder / one.name, extractor, size, options).section() for one in tasks]
    result = {
        "scale": size.name,
        "num_seeds": size.num_seeds,
        "extractor": Path(extractor).name,
        "version": tightlip.__version__,
        "corpora": sections,
    }
    return write_results(folder, "representation", result, csv_text(sections), page="vectors-paper")


@dataclass(frozen=True, kw_only=True)
class TrainingWay:
    """One way of training: the tables' row that it stands in, its run's name and its settings."""

    row: str
    name: str
    settings: dict[str, Any]
    compared: bool = True  # by all attackers; otherwise by the paper's, for the curve over ε and μ


def _ways(size: TablesScale) -> Iterator[TrainingWay]:
    yield TrainingWay(row="none", name="none", settings={"method": "none"})
    yield TrainingWay(row="adversarial", name="adversarial", settings={"method": "adversarial"})
    published = {"method": "dpnr", "mechanism": "laplace-as-published"}
    for epsilon in size.epsilons:
        yield TrainingWay(
            row="dpnr",
            name=f"dpnr-{epsilon:g}",
            settings=published | {"epsilon": epsilon},
            compared=epsilon == min(size.epsilons),
        )
    for dropout in size.dropouts:
        own = published | {"epsilon": 1.0, "dropout": dropout}
        name = f"dpnr-1-dropout-{dropout:g}"
        yield TrainingWay(row="dpnr", name=name, settings=own, compared=False)
    for mechanism in ("laplace", "gaussian"):
        for epsilon in size.calibrated:
            own = {"method": "dpnr", "mechanism": mechanism, "epsilon": epsilon}
            yield TrainingWay(row=mechanism, name=f"{mechanism}-{epsilon:g}", settings=own)


@dataclass(frozen=True)
class _Runs:
    """All ways of training on one corpus, each trained over the seeds, attacked and described."""

    task: PaperTask
    folder: Path
    extractor: str
    size: TablesScale
    options: RepresentOptions

    def section(self) -> dict[str, Any]:
        ways = list(_ways(self.size))
        rows, by_way = [], []
        with task(f"{self.task.name}: ways", len(ways)) as bar:
            for way in ways:
                bar.note(way.name)
                folder = self._trained(way)
                attackers = self.size.attackers if way.compared else ("mlp",)
                device = self.options.device
                report = represent_attack(folder, out=folder, attackers=attackers, device=device)
                rows.append(self._row(way, report.results))
                by_way.append(report.results)
                bar.advance()
        everything, version = [*chain.from_iterable(by_way)], tightlip.__version__
        write_page("vectors", self.folder / ATTACKS, results=everything, version=version)
        first = everything[0]
        sizes = ("dimensions", "num_train", "num_test", "num_test_users", "num_seen_in_train")
        return {
            **{name: getattr(self.task, name) for name in _TOLD},
            "private": list(self.task.private),
            **{name: first[name] for name in sizes},
            **({} if first["has_users"] else {"num_test_users": None}),
            # What the commonest label is right in, and what is left to read for one who guesses.
            "majority": {
                "main": over_seeds([one["main_majority"]["all"]["value"] for one in by_way[0]]),
                "privacy": {"mlp": self._privacy(by_way[0], "majority")},
            },
            "rows": rows,
        }

    def _trained(self, way: TrainingWay) -> Path:
        seeds = self.size.num_seeds
        made = represent_train(
            self.task.path,
            self.folder / way.name,
            seeds=seeds if seeds > 1 else None,
            options=self.options,
            label=self.task.label,
            private=self.task.private,
            extractor=self.extractor,
            split=self.task.split,
            **self.size.training,
            **way.settings,
        )
        assert isinstance(made, RepresentRuns) == (seeds > 1)
        return made.folder

    def _row(self, way: TrainingWay, results: list[dict[str, Any]]) -> dict[str, Any]:
        first = results[0]
        measured = next(iter(first["attributes"].values()))["attackers"]
        attackers = [name for name in self.size.attackers if name in measured]
        unseen = [one["main"].get("unseen", {}) for one in results]
        return {
            "way": way.row,
            "run": way.name,
            "epsilon": way.settings.get("epsilon"),
            "dropout": way.settings.get("dropout", 0.0),
            "guarantee": first["guarantee"],
            "main": over_seeds([one["main"]["all"]["value"] for one in results]),
            "main_unseen": over_seeds([one.get("value") for one in unseen]),
            "privacy": {name: self._privacy(results, name) for name in (*attackers, "strongest")},
            "strongest": self._strongest(results),
            "attributes": {name: self._read(results, name) for name in self.task.private},
            "groups": {name: _groups(results, name) for name in self.task.private},
        }

    def _privacy(self, results: list[dict[str, Any]], attacker: str) -> dict[str, Any]:
        """1 - X, or for entities 1 - F."""
        if self.task.kind == "attributes":
            return over_seeds([one["privacy"][attacker]["all"]["value"] for one in results])
        by_seed = [one["attributes"] for one in results]
        entities = [[_by_value(of[name], attacker) for name in self.task.private] for of in by_seed]
        return over_seeds([1 - _f1(counts) for counts in entities])

    def _strongest(self, results: list[dict[str, Any]]) -> dict[str, int]:
        """How often each attacker was chosen by the development part, over attributes and seeds."""
        by_seed = [one["attributes"] for one in results]
        chosen = Counter(of[name]["strongest"] for of in by_seed for name in self.task.private)
        return dict(chosen.most_common())

    def _read(self, results: list[dict[str, Any]], name: str) -> dict[str, Any]:
        """How often the paper's attacker is right where the attribute has each value."""
        counts = [_by_value(one["attributes"][name], "mlp") for one in results]
        return {value: over_seeds([_recall(one[value]) for one in counts]) for value in counts[0]}


def _by_value(attribute: dict[str, Any], attacker: str) -> dict[str, dict[str, int]]:
    """Of each value: how many test texts have it, how many were said to, and how many rightly."""
    if attacker == "majority":
        return dict(attribute["majority_by_value"])
    return dict(attribute["attackers"][attacker]["all"]["by_value"])


def _recall(counts: dict[str, int]) -> float | None:
    return counts["right"] / counts["num"] if counts["num"] else None


def _f1(entities: list[dict[str, dict[str, int]]]) -> float:
    """F1 over the presence of all entities together."""
    present = [counts["present"] for counts in entities]
    total = sum(one["num"] + one["said"] for one in present)
    return 2 * sum(one["right"] for one in present) / total if total else 0.0


def _groups(results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    by_seed = [one["fairness"][name] for one in results]
    tests = [one["p"] for one in by_seed if one["p"] is not None]
    return {
        "accuracy": {
            group: over_seeds([one["groups"][group]["value"] for one in by_seed])
            for group in by_seed[0]["groups"]
        },
        "p": statistics.median(tests) if len(tests) == len(by_seed) else None,
    }
