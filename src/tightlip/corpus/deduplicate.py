"""Sentences and documents that the corpus already said.

What a model saw twice it remembers better. The first occurrence stays, whoever
wrote it; case and white space do not make a difference. Of each distinct sentence
16 bytes of hash are kept, not its text.
"""

import re
from hashlib import blake2b

# After . ! ? (and a closing quote or bracket), and at the end of a line.
_BOUNDARY = re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+|\n\s*")
# A full stop that ends no sentence: after a title or an abbreviation.
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|e\.g|i\.e)\.$")
MIN_WORDS = 3


class SeenBefore:
    """Remembers texts by their hash."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __call__(self, words: list[str]) -> bool:
        """Whether these words, in this order, came before; from now on they did."""
        digest = blake2b(" ".join(words).casefold().encode("utf-8"), digest_size=16).digest()
        before = digest in self._seen
        self._seen.add(digest)
        return before


class DuplicateSentences:
    """Removes sentences of at least three words that stood in the corpus before.

    Holds:
        first_stays: the first occurrence of a sentence is never removed.
        settled: no sentence of three words stands twice in what is left.
    """

    def __init__(self) -> None:
        self.num_duplicates = 0
        self._seen_before = SeenBefore()

    def without(self, text: str) -> str:
        """`text` less its repeated sentences, which are counted."""
        kept: list[str] = []
        removed = 0
        for sentence, space in sentences(text):
            words = sentence.split()
            if len(words) >= MIN_WORDS and self._seen_before(words):
                removed += 1
                if "\n" in space and kept:
                    kept[-1] = space  # the line still ends where it did
            else:
                kept += [sentence, space]
        self.num_duplicates += removed
        return "".join(kept).rstrip() if removed else text


class DuplicateDocuments:
    """Tells documents whose whole text stood in the corpus before. Empty ones repeat nothing."""

    def __init__(self) -> None:
        self.num_duplicates = 0
        self._seen_before = SeenBefore()

    def is_duplicate(self, text: str) -> bool:
        words = text.split()
        duplicate = bool(words) and self._seen_before(words)
        self.num_duplicates += duplicate
        return duplicate


def sentences(text: str) -> list[tuple[str, str]]:
    """Each sentence with the white space after it; joined, they are `text` again.

    >>> sentences("So be it. Farewell!")
    [('So be it.', ' '), ('Farewell!', '')]
    """
    found, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        if "\n" not in boundary.group() and _ABBREVIATION.search(text[start : boundary.start()]):
            continue
        found.append((text[start : boundary.start()], boundary.group()))
        start = boundary.end()
    found.append((text[start:], ""))
    return found
