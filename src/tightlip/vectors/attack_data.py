"""What an eavesdropper works with: a run's texts released afresh, and what is to be read from them."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.core.run_folder import CONFIG
from tightlip.core.settings import read_toml
from tightlip.vectors.attack_figures import Target
from tightlip.vectors.attackers import Parts, Releases
from tightlip.vectors.data import PARTS, Examples, open_source, reading_of
from tightlip.vectors.settings import Categories, categories

FEWEST_PRESENT = 2  # training texts with a name, and without, that an attacker can learn from
COLUMN = "column:"

Encode = Callable[[list[str]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Entities:
    """Names whose presence is private: an attribute each, and where they come from."""

    names: list[str]
    found_by: str
    targets: list[Target]
    num_left_out: int  # too rare, or everywhere


def parts_of_run(examples: Examples) -> Parts[np.ndarray]:
    """The places of each part among the examples."""
    return Parts(**{name: np.flatnonzero(examples.parts == name) for name in PARTS})


def users_of(examples: Examples) -> list[str]:
    """Whose each text is; without users each text is somebody's own."""
    return examples.users or [str(row) for row in examples.rows]


def seen_in_train(examples: Examples, parts: Parts[np.ndarray]) -> np.ndarray:
    """Which test texts read as a training text does; case and white space make no difference."""
    reading = [reading_of(text) for text in examples.texts]
    trained = {reading[place] for place in parts.train}
    return np.asarray([reading[place] in trained for place in parts.test], dtype=bool)


def known_users(examples: Examples, parts: Parts[np.ndarray]) -> int:
    """How many test texts are by people who have training texts too."""
    if examples.users is None:
        return 0
    trained = {examples.users[place] for place in parts.train}
    return sum(examples.users[place] in trained for place in parts.test)


# Releases
def released_afresh(
    encode: Encode, texts: list[str], parts: Parts[np.ndarray], *, copies: int
) -> Releases:
    """One release of every text, and the mean of `copies` of them, the first among these."""
    with task("Releases", copies) as bar:
        single = encode(texts)
        bar.advance()
        total = single.astype(np.float64)
        for _ in range(copies - 1):
            total += encode(texts)
            bar.advance()
    mean = (total / copies).astype(np.float32)
    return Releases(
        single=parts.map(lambda places: single[places]),
        averaged=parts.map(lambda places: mean[places]),
    )


# What is to be read
def targets_of(
    run: Path, examples: Examples, parts: Parts[np.ndarray], attributes: Sequence[str] | None
) -> list[Target]:
    """The private attributes: the run's own, or those named, which may be any column."""
    wanted = list(examples.private) if attributes is None else list(dict.fromkeys(attributes))
    others = [name for name in wanted if name not in examples.private]
    columns = dict(zip(others, columns_of_run(run, others, examples), strict=True))
    return [
        target_of(name, examples.private.get(name) or categories(columns[name], name), parts)
        for name in wanted
    ]


def target_of(name: str, column: Categories, parts: Parts[np.ndarray]) -> Target:
    return Target(
        name=name, values=tuple(column.names), codes=parts.map(lambda places: column.ids[places])
    )


def columns_of_run(run: Path, names: Sequence[str], examples: Examples) -> list[list[Any]]:
    """Further columns of a run's corpus, for the texts it uses."""
    if not names:
        return []
    tree = read_toml(run / CONFIG)["corpus"]
    columns = {name: tree[name] for name in ("user_column", "text_column", "bad_rows")}
    corpus = open_source(tree.get("path") or run / "corpus.parquet", **columns).corpus
    found: dict[str, list[Any]] = {name: [] for name in names}
    there: dict[str, None] = {}
    for batch in corpus.batches():
        there |= dict.fromkeys(batch.attributes)
        for name, values in found.items():
            users = batch.users if name == tree["user_column"] else None
            values += users or batch.attributes.get(name) or [None] * len(batch)
    for name in names:
        if name not in there and name != tree["user_column"]:
            raise UsageError(
                f"The corpus of {run} has no column {name!r}. Columns there: {', '.join(there) or 'none'}."
            )
    return [[found[name][row] for row in examples.rows] for name in names]


# Names
def entities_of(run: Path, examples: Examples, parts: Parts[np.ndarray], source: str) -> Entities:
    """Names from a file, by a finder (`auto`), or from a column of ids (`column:NAME`)."""
    if source.startswith(COLUMN):
        (cells,) = columns_of_run(run, [source.removeprefix(COLUMN)], examples)
        names, there = listed_presence(cells)
        if not names:
            raise UsageError(f"{source} lists nobody in any text. Name a column that lists ids.")
        return _entities(names, there, parts, "a column of ids")
    if source == "auto":
        names, by = frequent_names([examples.texts[place] for place in parts.train])
    else:
        names, by = names_in_file(source), "a list"
    return _entities(names, presence(examples.texts, names), parts, by)


def listing_columns(
    run: Path, examples: Examples, attributes: Sequence[str] | None
) -> tuple[list[str] | None, str | None]:
    """The attributes without the one whose cells are lists of ids, and that one as an entity source."""
    if attributes is None:
        return None, None
    others = [name for name in attributes if name not in examples.private]
    cells = columns_of_run(run, others, examples)
    listing = [name for name, column in zip(others, cells, strict=True) if is_listing(column)]
    if len(listing) > 1:
        raise UsageError(
            f"{' and '.join(listing)} both list ids in each text. Attack one of them at a time."
        )
    plain = [name for name in attributes if name not in listing]
    return plain, COLUMN + listing[0] if listing else None


def _entities(
    names: list[str], there: np.ndarray, parts: Parts[np.ndarray], found_by: str
) -> Entities:
    codes = there.astype(np.int64)
    counts = there[parts.train].sum(axis=0)
    enough = (counts >= FEWEST_PRESENT) & (len(parts.train) - counts >= FEWEST_PRESENT)
    if not enough.any():
        raise UsageError(
            f"None of the {len(names)} names stands in {FEWEST_PRESENT} training texts and is missing from as many, so no "
            "attacker can learn it. Give names that do, with their capitals: --entities FILE"
        )
    kept = [place for place in np.argsort(-counts, kind="stable") if enough[place]]
    targets = [
        target_of(names[place], Categories(["absent", "present"], codes[:, place]), parts)
        for place in kept
    ]
    return Entities(
        names=[names[place] for place in kept],
        found_by=found_by,
        targets=targets,
        num_left_out=len(names) - len(kept),
    )


# Which people's names stand in a text: the private attribute of texts that are about others


MOST_NAMES = 5  # the paper keeps the five most frequent
_GIVE_A_LIST = "Give the names in a file, a name a line: --entities FILE"


def names_in_file(path: str | Path) -> list[str]:
    """The names of a file, a name a line; empty lines and repeated names are passed over."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"{path} is no file of names. Give one with a name a line, or --entities auto."
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text ({error}). Save it as UTF-8, a name a line."
        ) from error
    names = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not names:
        raise UsageError(f"{path} holds no name. Write a name a line.")
    return names


def presence(texts: Iterable[str], names: Sequence[str]) -> np.ndarray:
    """Whether each name stands in each text as whole words, [texts, names].

    Capitals count, so that Will is not will; runs of white space in a text do not.

    >>> presence(["Will you?", "I will, Ann  Lee."], ["Will", "Ann Lee"]).tolist()
    [[True, False], [False, True]]
    """
    patterns = [
        re.compile(r"(?<!\w)" + r"\s+".join(map(re.escape, name.split())) + r"(?!\w)")
        for name in names
    ]
    found = [[bool(pattern.search(text)) for pattern in patterns] for text in texts]
    return np.asarray(found, dtype=bool).reshape(-1, len(names))


def listed_presence(cells: Sequence[Any]) -> tuple[list[str], np.ndarray]:
    """Ids and their presence from a column whose cells list them: [1, 4], "1 4" or "1,4".

    >>> ids, there = listed_presence(["1 4", [4], None, ""])
    >>> ids, there.astype(int).tolist()
    (['1', '4'], [[1, 1], [0, 1], [0, 0], [0, 0]])
    """
    listed = [_ids(cell) for cell in cells]
    ids = sorted({one for row in listed for one in row}, key=lambda one: (len(one), one))
    there = np.asarray([[one in row for one in ids] for row in listed], dtype=bool)
    return ids, there.reshape(-1, len(ids))


def is_listing(cells: Sequence[Any]) -> bool:
    """Whether a column's cells are lists."""
    known = [cell for cell in cells if cell is not None]
    return bool(known) and all(isinstance(cell, list | tuple | np.ndarray) for cell in known)


def _ids(cell: Any) -> set[str]:
    if cell is None:
        return set()
    if isinstance(cell, str):
        return set(re.findall(r"[^\s,;]+", cell))
    if isinstance(cell, list | tuple | np.ndarray):
        return {str(one) for one in cell}
    return {str(cell)}


# Finding names
def frequent_names(texts: Sequence[str], most: int = MOST_NAMES) -> tuple[list[str], str]:
    """The person names in most texts, the most frequent first, and what found them."""
    finder, by = _finder()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(set(finder(text)))
    if not counts:
        raise UsageError(f"{by} found no person's name in the training part. {_GIVE_A_LIST}")
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    return ranked[:most], by


def _finder() -> tuple[Callable[[str], Iterable[str]], str]:
    """NLTK, which the paper used, or spaCy."""
    for make in (_nltk_finder, _spacy_finder):
        found = make()
        if found is not None:
            return found
    raise UsageError(
        "--entities auto needs NLTK or spaCy, with an English model, to find people's names, and neither is "
        f"installed. {_GIVE_A_LIST}"
    )


def _nltk_finder() -> tuple[Callable[[str], Iterable[str]], str] | None:
    try:
        import nltk
    except ImportError:
        return None

    def people(text: str) -> Iterable[str]:
        tree = nltk.ne_chunk(nltk.pos_tag(nltk.word_tokenize(text)))
        for piece in tree:
            if getattr(piece, "label", lambda: None)() == "PERSON":
                yield " ".join(word for word, _ in piece.leaves())

    try:
        list(people("Ann Lee wrote."))
    except LookupError:  # its models are downloads of their own
        return None
    return people, "NLTK"


def _spacy_finder() -> tuple[Callable[[str], Iterable[str]], str] | None:
    try:
        import spacy

        pipeline = spacy.load("en_core_web_sm")
    except (ImportError, OSError):  # no spaCy, or no model
        return None
    people = lambda text: (e.text for e in pipeline(text).ents if e.label_ == "PERSON")  # noqa: E731
    return people, "spaCy"
