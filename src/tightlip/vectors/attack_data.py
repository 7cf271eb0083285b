"""What an eavesdropper works with: a run's texts released afresh, and what is to be read from them.

That is an attribute of each text, a column of the corpus; or whether a person's name stands in it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.vectors.attack import AttackInput, Entities
from tightlip.vectors.attack_figures import Target
from tightlip.vectors.attackers import Arrays, Parts, Releases
from tightlip.vectors.categories import Categories, categories
from tightlip.vectors.data import PARTS, Examples, read_columns, source_of_run
from tightlip.vectors.encode import Device, lines_of
from tightlip.vectors.grid_noise import GridNoise
from tightlip.vectors.halves import SERVER
from tightlip.vectors.release import normalised, released
from tightlip.vectors.server import load_server
from tightlip.vectors.settings import AttackSettings

FEWEST_PRESENT = 2  # training texts with a name, and without, that an attacker can learn from
MOST_NAMES = 5  # the paper keeps the five most frequent
COLUMN = "column:"
_GIVE_A_LIST = "Give the names in a file, a name a line: --entities FILE"

NameFinder = Callable[[str], Iterable[str]]


def attack_input(
    run: Path,
    examples: Examples,
    device: Device,
    settings: AttackSettings,
    encoding: dict[str, Any],
) -> tuple[AttackInput, str | None]:
    """The run as arrays, and where the names in its texts come from."""
    parts = parts_of_run(examples)
    targets, listing = what_to_read(run, examples, parts, settings.attributes)
    source = settings.entities or listing
    entities = None if source is None else entities_of(run, examples, parts, source)
    if not targets and entities is None:
        raise UsageError(
            f"{run} has no private columns, so there is nothing to read. Name some: --attributes, or --entities."
        )
    releases, bare = _vectors(examples, parts, device, settings.copies, encoding)
    right, plain = _main_task(run, examples, parts, releases)
    users = users_of(examples)
    given = AttackInput(
        releases=releases,
        bare=bare,
        targets=targets,
        entities=entities,
        users=[users[place] for place in parts.test],
        seen=examples.seen_in_train(),
        main_right=right,
        main_plain=plain,
    )
    return given, source


def _vectors(
    examples: Examples, parts: Arrays, device: Device, copies: int, encoding: dict[str, Any]
) -> tuple[Releases, Arrays]:
    """Fresh releases as an eavesdropper hears them, and the normalised vectors before noise."""
    raw = device.extractor.encode(examples.texts, **encoding)
    release = partial(device.encode, examples.texts, **encoding)
    if not device.mechanism.dropout:
        # Without masked words every release begins with the same vectors; only noise is fresh.
        release = partial(released, raw, device.mechanism, GridNoise())
    releases = released_afresh(release, parts, copies=copies)
    bare = normalised(raw, device.mechanism).astype("float32")
    return releases, parts.map(bare.__getitem__)


def _main_task(
    run: Path, examples: Examples, parts: Arrays, releases: Releases
) -> tuple[np.ndarray, np.ndarray]:
    """Whether the server, and whether the commonest training label, is right on each test text."""
    guessed, _ = load_server(run / SERVER).classify(releases.single.test)
    label = examples.label
    commonest = np.bincount(label.ids[parts.train]).argmax()
    truth = label.ids[parts.test]
    right = [label.names[one] == name for one, name in zip(truth, guessed, strict=True)]
    return np.array(right), truth == commonest


def parts_of_run(examples: Examples) -> Arrays:
    """The places of each part among the examples."""
    return Parts(**{name: np.flatnonzero(examples.parts == name) for name in PARTS})


def users_of(examples: Examples) -> list[str]:
    """Whose each text is; without users each text is somebody's own."""
    return examples.users or [str(row) for row in examples.rows]


# Releases
def released_afresh(release: Callable[[], np.ndarray], parts: Arrays, *, copies: int) -> Releases:
    """One release of every text, and the mean of `copies` of them, the first among these."""
    with task("Releases", copies) as bar:
        single = release()
        bar.advance()
        total = single.astype(np.float64)
        for _ in range(copies - 1):
            total += release()
            bar.advance()
    mean = (total / copies).astype(np.float32)
    return Releases(single=parts.map(single.__getitem__), averaged=parts.map(mean.__getitem__))


# What is to be read
def what_to_read(
    run: Path, examples: Examples, parts: Arrays, attributes: Sequence[str] | None
) -> tuple[list[Target], str | None]:
    """The private attributes: the run's own, or those named, which may be any column.

    One whose cells are lists of ids is no attribute: it comes back as a source of entities.
    """
    wanted = list(examples.private) if attributes is None else list(dict.fromkeys(attributes))
    others = [name for name in wanted if name not in examples.private]
    columns = columns_of_run(run, others, examples)
    listing = [name for name, cells in columns.items() if is_listing(cells)]
    if len(listing) > 1:
        raise UsageError(
            f"{' and '.join(listing)} both list ids in each text. Attack one of them at a time."
        )
    targets = [
        target_of(name, examples.private.get(name) or categories(columns[name], name), parts)
        for name in wanted
        if name not in listing
    ]
    return targets, COLUMN + listing[0] if listing else None


def target_of(name: str, column: Categories, parts: Arrays) -> Target:
    codes = parts.map(column.ids.__getitem__)
    return Target(name=name, values=tuple(column.names), codes=codes)


def columns_of_run(run: Path, names: Sequence[str], examples: Examples) -> dict[str, list[Any]]:
    """Further columns of a run's corpus, for the texts it uses."""
    named = read_columns(source_of_run(run), names).named if names else {}
    return {name: [cells[row] for row in examples.rows] for name, cells in named.items()}


# Names
def entities_of(run: Path, examples: Examples, parts: Arrays, source: str) -> Entities:
    """Names from a file, by a finder (`auto`), or from a column of ids (`column:NAME`)."""
    if source.startswith(COLUMN):
        (cells,) = columns_of_run(run, [source.removeprefix(COLUMN)], examples).values()
        names, there = listed_presence(cells)
        if not names:
            raise UsageError(f"{source} lists nobody in any text. Name a column that lists ids.")
        return _entities(names, there, parts, "a column of ids")
    if source == "auto":
        names, by = frequent_names([examples.texts[place] for place in parts.train])
    else:
        names, by = names_in_file(source), "a list"
    return _entities(names, presence(examples.texts, names), parts, by)


def _entities(names: list[str], there: np.ndarray, parts: Arrays, found_by: str) -> Entities:
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
    return Entities(found_by=found_by, targets=targets, num_left_out=len(names) - len(kept))


def names_in_file(path: str | Path) -> list[str]:
    """The names of a file, a name a line; empty lines and repeated names are passed over."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"{path} is not a file of names. Give one with a name a line, or --entities auto."
        )
    names = list(dict.fromkeys(line.strip() for line in lines_of(path) if line.strip()))
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
    there = [[bool(pattern.search(text)) for pattern in patterns] for text in texts]
    return np.asarray(there, dtype=bool).reshape(-1, len(names))


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
    if isinstance(cell, str):
        return set(re.findall(r"[^\s,;]+", cell))
    if isinstance(cell, list | tuple | np.ndarray):
        return {str(one) for one in cell}
    return set() if cell is None else {str(cell)}


def frequent_names(texts: Sequence[str], most: int = MOST_NAMES) -> tuple[list[str], str]:
    """The person names in most texts, the most frequent first, and what found them."""
    finder, by = _finder()
    counts = Counter(chain.from_iterable(set(finder(text)) for text in texts))
    if not counts:
        raise UsageError(f"{by} found no person's name in the training part. {_GIVE_A_LIST}")
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    return ranked[:most], by


def _finder() -> tuple[NameFinder, str]:
    """NLTK, which the paper used, or spaCy."""
    for make in (_nltk_finder, _spacy_finder):
        if (finder := make()) is not None:
            return finder
    raise UsageError(
        "--entities auto needs NLTK or spaCy, with an English model, to find people's names, and neither is "
        f"installed. {_GIVE_A_LIST}"
    )


def _nltk_finder() -> tuple[NameFinder, str] | None:
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


def _spacy_finder() -> tuple[NameFinder, str] | None:
    try:
        import spacy

        pipeline = spacy.load("en_core_web_sm")
    except (ImportError, OSError):  # no spaCy, or no model
        return None
    people = lambda text: (e.text for e in pipeline(text).ents if e.label_ == "PERSON")  # noqa: E731
    return people, "spaCy"
