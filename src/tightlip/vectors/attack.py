"""What is private in the texts of one run, attributes or people's names in them; all attackers on
all of it, and what they come to."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.core.resampling import HOW
from tightlip.vectors import attack_figures as figures
from tightlip.vectors import attackers
from tightlip.vectors.attack_figures import JudgedRows, Target
from tightlip.vectors.attackers import Arrays, Reading, Releases, read_attribute
from tightlip.vectors.categories import Categories
from tightlip.vectors.data import Examples, columns_of_run
from tightlip.vectors.encode import lines_of
from tightlip.vectors.settings import AttackSettings

# Not attackers: the likeliest of those with one release, and one who hears the vectors bare.
STRONGEST, OPEN_BOOK = "strongest", "bare"
MOST_POINTS = 500  # of a picture
FEWEST_POINTS = 8
FIRST_DIMENSIONS = 50  # principal components, as t-SNE's authors advise
FEWEST_PRESENT = 2  # training texts with a name, and without, that an attacker can learn from
MOST_NAMES = 5  # the paper keeps the five most frequent
COLUMN = "column:"
_GIVE_A_LIST = "Give the names in a file, a name a line: --entities FILE"

Views = dict[str, JudgedRows]  # by which test rows they are of
Readings = dict[str, Reading]  # by attacker
NameFinder = Callable[[str], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class Entities:
    """Names whose presence is private: an attribute each, and where they come from."""

    found_by: str
    targets: list[Target]
    num_left_out: int  # too rare, or everywhere


@dataclass(frozen=True, kw_only=True)
class AttackInput:
    """A run as arrays: vectors with and without noise, what is private, and the main task."""

    releases: Releases
    bare: Arrays  # normalised, without noise and without masked words
    targets: Sequence[Target]
    entities: Entities | None
    users: Sequence[str]  # of the test part, like all that follows
    seen: np.ndarray  # which texts also stand in the training part
    main_right: np.ndarray  # whether the server is right
    main_plain: np.ndarray  # whether the commonest label is


def attack(given: AttackInput, settings: AttackSettings, *, device: str = "cpu") -> dict[str, Any]:
    """Every figure of one run, ready to be written as JSON.

    Holds:
        both: where test texts also stand in train, every figure comes with and without them.
        judged_late: the strongest attacker is the one that was best on the development part.
    """
    views = _views(given, settings)
    draws = views["all"].draws
    targets, entities = list(given.targets), given.entities
    named = [] if entities is None else entities.targets
    with task("Attackers", len(targets) + len(named)) as bar:
        readings = []
        for target in [*targets, *named]:
            bar.note(target.name if target in targets else "a name")
            readings.append(_read_by_all(given, target, settings, device))
            bar.advance()
    demographic, about_names = readings[: len(targets)], readings[len(targets) :]
    groups = {t.name: [None if n < 0 else t.values[n] for n in t.codes.test] for t in targets}
    fair = partial(figures.fairness, given.main_right, draws=draws, seed=settings.seed)
    return {
        "intervals": HOW,
        "num_test": len(given.users),
        "num_test_users": draws.num_users,
        "num_seen_in_train": int(given.seen.sum()),
        "main": _in_views(views, lambda on: on.draws.share(given.main_right[on.rows])),
        "main_majority": _in_views(views, lambda on: on.draws.share(given.main_plain[on.rows])),
        "attributes": {
            target.name: _attribute(target, read, views, given.users)
            for target, read in zip(targets, demographic, strict=True)
        },
        "privacy": _privacy(targets, demographic, views) if targets else None,
        "entities": None if entities is None else _names(entities, about_names, views),
        "fairness": {name: fair(groups=each) for name, each in groups.items()},
        "picture": _picture(given, settings) if settings.pictures else None,
    }


def _views(given: AttackInput, settings: AttackSettings) -> Views:
    """All test rows; and those that are not in the training part, where some are."""
    masks = {"all": np.ones(len(given.users), dtype=bool)}
    if given.seen.any() and not given.seen.all():
        masks["unseen"] = ~given.seen
    options = {"seed": settings.seed, "num_draws": settings.num_bootstraps}
    return {name: figures.judged_rows(given.users, mask, **options) for name, mask in masks.items()}


def _in_views(views: Views, figure: Any) -> dict[str, Any]:
    return {name: figure(on) for name, on in views.items()}


def _read_by_all(
    given: AttackInput, target: Target, settings: AttackSettings, device: str
) -> Readings:
    """Each attacker's reading of one attribute, with the strongest and the bare vectors' last."""
    known = target.codes.map(lambda codes: codes >= 0)
    known = replace(known, test=np.ones(len(known.test), dtype=bool))
    values, single, averaged, bare = (
        each.map(lambda rows, kept: rows[kept], known)
        for each in (target.codes, given.releases.single, given.releases.averaged, given.bare)
    )
    releases = Releases(single=single, averaged=averaged)
    read = partial(
        read_attribute, num_values=len(target.values), name=target.name, seed=settings.seed
    )
    readings = {name: read(name, releases, values, device=device) for name in settings.attackers}
    of_one_release = (reading for name, reading in readings.items() if name != "averaged")
    strongest = attackers.best_on_dev(of_one_release, values.dev)
    open_book = read("averaged", Releases(single=bare, averaged=bare), values)
    return {**readings, STRONGEST: strongest, OPEN_BOOK: open_book}


def _attribute(
    target: Target, readings: Readings, views: Views, users: Sequence[str]
) -> dict[str, Any]:
    return {
        "values": list(target.values),
        # Such as speakers: the page then writes no value out.
        "names_people": not set(target.values).isdisjoint(users),
        "strongest": next(name for name, read in readings.items() if read is readings[STRONGEST]),
        "majority": _in_views(views, lambda on: figures.majority_figure(target, on)),
        "majority_by_value": figures.by_value(
            target, np.full(len(users), target.majority), views["all"]
        ),
        "attackers": {
            name: _in_views(views, lambda on, r=read: figures.attribute_figures(target, r, on))
            for name, read in readings.items()
        },
    }


def _privacy(targets: list[Target], readings: list[Readings], views: Views) -> dict[str, Any]:
    """1 - X by attacker, and of the majority."""
    majority = _in_views(views, lambda on: figures.majority_privacy(targets, on))
    return {"majority": majority, **_by_all(figures.empirical_privacy, targets, readings, views)}


def _by_all(
    figure: Callable[..., Any], targets: list[Target], readings: list[Readings], views: Views
) -> dict[str, Any]:
    """A figure over all targets, for each attacker."""
    by_name = {name: [each[name] for each in readings] for name in readings[0]}
    return {
        name: _in_views(views, lambda on, own=own: figure(targets, own, on))
        for name, own in by_name.items()
    }


def _names(entities: Entities, readings: list[Readings], views: Views) -> dict[str, Any]:
    targets = entities.targets
    return {
        "names": [target.name for target in targets],
        "found_by": entities.found_by,
        "num_left_out": entities.num_left_out,
        "shares": [float((target.codes.test == 1).mean()) for target in targets],
        "majority": _in_views(views, lambda on: figures.majority_f1_privacy(targets, on)),
        "everywhere": _in_views(views, lambda on: figures.everywhere_f1_privacy(targets, on)),
        "attackers": _by_all(figures.entity_figures, targets, readings, views),
        "each": {
            name: [
                figures.attribute_figures(target, by_name[name], views["all"])
                for target, by_name in zip(targets, readings, strict=True)
            ]
            for name in (STRONGEST, OPEN_BOOK)
        },
    }


def _picture(given: AttackInput, settings: AttackSettings) -> dict[str, Any] | None:
    """Places of some test vectors before and after the noise, and their values as codes."""
    rows = chosen_rows(len(given.users), seed=settings.seed)
    with task("Pictures", 2) as bar:
        before = flat_places(given.bare.test[rows], seed=settings.seed)
        bar.advance()
        after = flat_places(given.releases.single.test[rows], seed=settings.seed)
    if before is None or after is None:
        return None
    return {
        "num_points": len(rows),
        "before": before.tolist(),
        "after": after.tolist(),
        "codes": {target.name: target.codes.test[rows].tolist() for target in given.targets},
    }


def chosen_rows(num_rows: int, *, most: int = MOST_POINTS, seed: int) -> np.ndarray:
    """Which rows are drawn: all, or `most` of them at random, in order."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, most, replace=False))


def flat_places(vectors: np.ndarray, *, seed: int) -> np.ndarray | None:
    """Two coordinates between 0 and 1 for each vector; null where too few differ.

    Holds:
        same_again: one seed gives one picture.
        apart: well separated clusters stay apart.
    """
    vectors = np.asarray(vectors, dtype=np.float64)
    # Equal vectors share a place. scikit-learn's t-SNE crashes on vectors that are all equal.
    vectors, place_of = np.unique(vectors, axis=0, return_inverse=True)
    if len(vectors) < FEWEST_POINTS:
        return None
    vectors = (vectors - vectors.mean(axis=0)) / vectors.std()
    most = min(FIRST_DIMENSIONS, *vectors.shape)
    if most < vectors.shape[1]:
        components = attackers.sklearn_part("decomposition").PCA(most, random_state=seed)
        vectors = components.fit_transform(vectors)
    placed = attackers.sklearn_part("manifold").TSNE(
        n_components=2,
        init="pca",
        learning_rate="auto",
        perplexity=min(30.0, (len(vectors) - 1) / 3),
        random_state=seed,
    )
    places = placed.fit_transform(vectors)
    low, high = places.min(axis=0), places.max(axis=0)  # each axis fills its frame
    return np.round((places - low) / np.where(high > low, high - low, 1), 4)[place_of.reshape(-1)]


# What is to be read
def target_of(name: str, column: Categories, parts: Arrays) -> Target:
    return Target(name=name, values=tuple(column.names), codes=parts.map(column.ids.__getitem__))


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
    classes = ["absent", "present"]
    targets = [target_of(names[n], Categories(classes, codes[:, n]), parts) for n in kept]
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
    spaced = (r"\s+".join(map(re.escape, name.split())) for name in names)
    patterns = [re.compile(rf"(?<!\w){name}(?!\w)") for name in spaced]
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
    return sorted(counts, key=lambda name: (-counts[name], name))[:most], by


def _finder() -> tuple[NameFinder, str]:
    """NLTK, which the paper used, or spaCy."""
    for make, name in ((_nltk_finder, "NLTK"), (_spacy_finder, "spaCy")):
        if (finder := make()) is not None:
            return finder, name
    raise UsageError(
        "--entities auto needs NLTK or spaCy, with an English model, to find people's names, and neither is "
        f"installed. {_GIVE_A_LIST}"
    )


def _nltk_finder() -> NameFinder | None:
    try:
        import nltk
    except ImportError:
        return None

    def people(text: str) -> Iterable[str]:
        for piece in nltk.ne_chunk(nltk.pos_tag(nltk.word_tokenize(text))):
            if getattr(piece, "label", lambda: None)() == "PERSON":
                yield " ".join(word for word, _ in piece.leaves())

    try:
        list(people("Ann Lee wrote."))
    except LookupError:  # its models are downloads of their own
        return None
    return people


def _spacy_finder() -> NameFinder | None:
    try:
        import spacy

        pipeline = spacy.load("en_core_web_sm")
    except (ImportError, OSError):  # no spaCy, or no model
        return None
    return lambda text: (e.text for e in pipeline(text).ents if e.label_ == "PERSON")
