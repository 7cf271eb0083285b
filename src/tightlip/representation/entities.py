"""Which people's names stand in a text: the private attribute of texts that are about others.

Names come from a file, a name a line, or are the person names found most often in the training
part by NLTK or spaCy, whichever is installed. A column that lists the ids of the people in each
text serves as well. Each name then is an attribute of its own: present or absent.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError

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
