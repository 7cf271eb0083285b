"""What goes out of a corpus before it is split: personal details, and text that it already said.

Scrubbing replaces details by what they were: <EMAIL>, <PHONE> and so on. Rules find what has a
form: e-mail addresses, URLs, IP addresses, card and account numbers, phone numbers. Names have no
form; Presidio finds them where it is installed (`presidio_names`). A placeholder is ordinary text
to every tokenizer.

Deduplication leaves out sentences or documents that stood before: what a model saw twice it
remembers better. The first occurrence stays, whoever wrote it; case and white space do not make a
difference. Of each distinct sentence 16 bytes of hash are kept, not its text.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.corpus.encoding import pieces
from tightlip.corpus.tables import DocumentBatch
from tightlip.corpus.tokens import spread

NameFinder = Callable[[str], list[tuple[int, int]]]
PLACEHOLDERS = ["<EMAIL>", "<URL>", "<IP>", "<CARD>", "<ACCOUNT>", "<PHONE>", "<NAME>"]
_PLACEHOLDER = re.compile("|".join(PLACEHOLDERS))
_SPACY_MODELS = ["en_core_web_lg", "en_core_web_trf", "en_core_web_md", "en_core_web_sm"]
# After . ! ? (and a closing quote or bracket), and at the end of a line.
_BOUNDARY = re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+|\n\s*")
# A full stop that ends no sentence: after a title or an abbreviation.
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|e\.g|i\.e)\.$")
MIN_WORDS = 3
# Nobody says which country a text is from, and a setting would not help: one corpus has many. So a
# number without + counts when any of these writes it so. Of more countries more tables would look
# like numbers, and each is asked of every one. North America has rules of its own below.
_REGIONS = ("GB", "DE", "FR", "IT", "ES", "NL", "AU", "IN", "BR", "MX", "JP", "KR", "CN", "RU")
# Dates, thousands, lists of small numbers, decimals.
_NO_PHONE = re.compile(
    r"\d{4}([-./])\d\d\1\d\d|\d\d([-./])\d\d\2(?:19|20)\d\d|[1-9]\d{0,2}(?:[ .]\d{3})+$"
    r"|[1-9]\d(?:\D\d\d)+$|[^.]*\.\d+(?![.\d])"
)


class Cleaner:
    """Cleans batches in corpus order. Duplicates are counted even where they stay.

    Scrubbing comes first: two texts that differ in a phone number alone are the same text.
    """

    def __init__(self, *, deduplicate: str, scrub: bool, names: bool) -> None:
        self._deduplicate, self._scrub = deduplicate, scrub
        self._names = presidio_names() if names else None
        self.sentences, self.documents = DuplicateSentences(), DuplicateDocuments()
        self.documents_per_user: Counter[str] = Counter()
        self.scrubbed: Counter[str] = Counter()
        self.num_read = self.num_removed = self.num_emptied = 0

    def clean(self, batch: DocumentBatch) -> DocumentBatch:
        """The batch without what is to go; whole documents may be missing."""
        self.num_read += len(batch)
        texts = [self._cleaned(text) for text in batch.texts]
        rest = batch.where([text is not None for text in texts])
        self.documents_per_user.update(rest.users)
        return replace(rest, texts=[text for text in texts if text is not None])

    def statistics(self, num_skipped: int) -> dict[str, Any]:
        """What was read, found and removed."""
        sentences = self.sentences.num_duplicates if self._deduplicate == "sentences" else 0
        return {
            "documents_read": self.num_read,
            "skipped_rows": num_skipped,
            "duplicate_documents": self.documents.num_duplicates,
            "duplicate_sentences": self.sentences.num_duplicates,
            "scrubbed": dict(sorted(self.scrubbed.items())),
            "removed": {
                "documents": self.num_removed + self.num_emptied,
                "sentences": sentences,
                "emptied_documents": self.num_emptied,
            },
            "documents": self.documents_per_user.total(),
            "users": len(self.documents_per_user),
            "documents_per_user": spread(np.array([*self.documents_per_user.values()])),
        }

    def _cleaned(self, text: str) -> str | None:
        if self._scrub:
            text, counts = scrub(text, names=self._names)
            self.scrubbed.update(counts)
        is_duplicate = self.documents.is_duplicate(text)
        rest = self.sentences.without(text)
        if self._deduplicate == "documents":
            self.num_removed += is_duplicate
            return None if is_duplicate else text
        if self._deduplicate == "none":
            return text
        emptied = bool(text.strip()) and not rest.strip()
        self.num_emptied += emptied
        return None if emptied else rest


class Duplicates:
    """Remembers texts by their hash, and counts those that came before."""

    def __init__(self) -> None:
        self.num_duplicates = 0
        self._seen: set[bytes] = set()

    def seen_before(self, words: list[str]) -> bool:
        """Whether these words, in this order, came before; from now on they did."""
        digest = blake2b(" ".join(words).casefold().encode("utf-8"), digest_size=16).digest()
        before = digest in self._seen
        self._seen.add(digest)
        return before


class DuplicateSentences(Duplicates):
    """Removes sentences of at least three words that stood in the corpus before.

    Holds:
        first_stays: the first occurrence of a sentence is never removed.
        settled: no sentence of three words stands twice in what is left.
    """

    def without(self, text: str) -> str:
        """`text` less its repeated sentences, which are counted."""
        kept: list[str] = []
        removed = 0
        for sentence, space in sentences(text):
            words = sentence.split()
            if len(words) >= MIN_WORDS and self.seen_before(words):
                removed += 1
                if "\n" in space and kept:
                    kept[-1] = space  # the line still ends where it did
            else:
                kept += [sentence, space]
        self.num_duplicates += removed
        return "".join(kept).rstrip() if removed else text


class DuplicateDocuments(Duplicates):
    """Tells documents whose whole text stood in the corpus before. Empty ones repeat nothing."""

    def is_duplicate(self, text: str) -> bool:
        words = text.split()
        duplicate = bool(words) and self.seen_before(words)
        self.num_duplicates += duplicate
        return duplicate


def sentences(text: str) -> list[tuple[str, str]]:
    """Each sentence with the white space after it; joined, they are `text` again.

    >>> sentences("So be it. Farewell!")
    [('So be it.', ' '), ('Farewell!', '')]
    """
    parts, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        if "\n" not in boundary.group() and _ABBREVIATION.search(text[start : boundary.start()]):
            continue
        parts.append((text[start : boundary.start()], boundary.group()))
        start = boundary.end()
    parts.append((text[start:], ""))
    return parts


def scrub(text: str, *, names: NameFinder | None = None) -> tuple[str, dict[str, int]]:
    """`text` without personal details, and how many of each kind there were.

    Holds:
        precise: dates, years, prices, times and decimals stay.
        settled: scrubbing a scrubbed text changes nothing.

    >>> scrub("Write to ann@example.org by 2003-05-01.")
    ('Write to <EMAIL> by 2003-05-01.', {'EMAIL': 1})
    """
    counts: Counter[str] = Counter()
    before = None
    while text != before:  # of two numbers in a row, the first may hide the second
        before = text
        for rule in _RULES:
            if not rule.hints or any(hint in text for hint in rule.hints):
                text, number = _replaced(text, rule.kind, _found(rule, text))
                counts[rule.kind] += number
    if names is not None:
        text, counts["NAME"] = _replaced(text, "NAME", _apart(text, names(text)))
    return text, dict(+counts)


def _found(rule: "_Rule", text: str) -> Iterator[tuple[int, int]]:
    match = rule.pattern.search(text)
    while match:
        start, length = match.start(), rule.replaced(match.group())
        if length:
            yield start, start + length
        match = rule.pattern.search(text, start + max(length, 1))


def _replaced(text: str, kind: str, spans: Iterable[tuple[int, int]]) -> tuple[str, int]:
    """The text with the kind in the place of each span, and how many there were."""
    kept, end = [], 0
    for start, stop in spans:
        kept += [text[end:start], f"<{kind}>"]
        end = stop
    return "".join([*kept, text[end:]]), len(kept) // 2


# What a rule's match really is: how many of its characters to replace, 0 for none.


def _url(match: str) -> int:
    return len(match.rstrip(".,;:!?'\")]}»”’"))


def _ip(match: str) -> int:
    candidate = match.rstrip(".:") if not match.endswith("::") else match
    try:
        address = ipaddress.ip_address(candidate)
    except ValueError:
        return 0
    # "a::b" is also C++.
    is_code = address.version == 6 and not re.search(r"\d", candidate)
    return 0 if is_code else len(candidate)


def _card(match: str) -> int:
    digits = [int(digit) for digit in match if digit.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return len(match) if (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 else 0


def _iban(match: str) -> int:
    """The longest beginning that passes ISO 7064 mod 97; words may follow an IBAN."""
    for end in range(len(match), 14, -1):
        plain = re.sub(r"[ -]", "", match[:end])
        ends_a_word = end == len(match) or match[end] in " -"
        if ends_a_word and 15 <= len(plain) <= 34 and match[end - 1] not in " -":
            number = "".join(str(int(character, 36)) for character in plain[4:] + plain[:4])
            if int(number) % 97 == 1:
                return end
    return 0


def _long_number(match: str) -> int:
    if _num_digits(match) < 8:
        return 0
    compact_date = re.fullmatch(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])", match)
    return 0 if compact_date else len(match)


def _abroad(match: str) -> int:
    """The longest beginning that may be a number of the country it names; a year may follow one."""
    import phonenumbers

    ends = [end.start() for end in re.finditer(r"(?<=[\d)])(?!\d|\))", match)]
    for end in [end for end in reversed(ends) if _num_digits(match[:end]) >= 8]:
        with suppress(phonenumbers.NumberParseException):
            if phonenumbers.is_possible_number(phonenumbers.parse(match[:end])):
                return end
    return 0


def _at_home(match: str) -> int:
    """How much of it is a number as a country of `_REGIONS` writes it."""
    if _num_digits(match) < 9 or _NO_PHONE.match(match):
        return 0
    from phonenumbers import Leniency, PhoneNumberMatcher

    # After a trunk 0 people group as they like.
    has_trunk = re.match(r"\(?0\d", match)
    leniency = Leniency.VALID if has_trunk else Leniency.EXACT_GROUPING
    for region in _REGIONS:
        for found in PhoneNumberMatcher(match, region, leniency=leniency):
            if found.start == 0:
                return found.end
    return 0


def _num_digits(match: str) -> int:
    return sum(map(str.isdigit, match))


def _local_phone(match: str) -> int:
    # "500-1000 people" is a range.
    return 0 if match.endswith("00") else len(match)


@dataclass(frozen=True)
class _Rule:
    kind: str
    pattern: re.Pattern
    replaced: Callable[[str], int]
    hints: tuple[str, ...] = ()  # a text with none of these cannot match


# Said after a pattern's first character, so that `re` can skip to the next one it may be.
# A number stands free: not inside a word, a longer number, an amount of money or a chain of hyphens.
_FREE = r"(?<![\w$€£].)(?<!\w[-./,:].)"
_END = r"(?![\w$€£]|[-./,:]\w)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_DOMAINS = ("com", "org", "net", "edu", "gov", "mil", "info", "io", "co.uk", "ac.uk", "de", "fr")
_TLD = "|".join(map(re.escape, _DOMAINS))
_AREA = (
    r"(?:(?<=1)[ .-](?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])|(?<=\()[2-9]\d\d\) ?|(?<=[2-9])\d\d[ .-])"
)

_WEB = r"(?i:\b(?:https?|ftp)://|\bwww\.)[^\s<>\"]+"
_EMAIL = r"(?<![\w.+%'-])[\w.+%'-]{1,64}+@(?:[\w-]{1,63}\.){1,8}[\w-]{2,63}"
_SITE = rf"(?<![\w.@-])(?:[A-Za-z0-9-]{{1,63}}\.){{1,8}}(?:{_TLD})\b(?:[/?#][^\s<>\"]*)?(?![\w@])"
_IPV6 = r"(?<![\w:.])(?=[0-9A-Fa-f]{0,4}:)[0-9A-Fa-f:]{2,39}(?:\.\d{1,3}){0,3}(?!\w)"
_FIRST_OCTET = r"[0-9](?<![\w.].)(?:(?<=2)5[0-5]|(?<=2)[0-4]\d|(?<=1)\d\d|\d?)"
_ABROAD = r"\+(?<!\w.)(?<!\+.)\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){2,6}(?!\w)"
_BETWEEN = r"(?: ?[/-] ?|[ .]|(?<=\)))"
_AT_HOME = rf"[\d(]{_FREE}(?<!\d .)\d{{0,5}}\)?(?:{_BETWEEN}\(?\d{{2,8}}\)?){{1,4}}{_END}"
_LONG = r"[A-Z\d](?<![\w$€£].)(?<!\d[.,].)[A-Z]{0,3}\d{7,}(?!\w|[.,]\d)"

# In this order: an address inside a URL belongs to the URL, a card number is also a long number.
_RULES = [
    _Rule(kind, re.compile(pattern), replaced, hints)
    for kind, pattern, replaced, hints in [
        ("URL", _WEB, _url, ("://", "www.", "Www.", "WWW.")),
        ("EMAIL", _EMAIL, len, ("@",)),
        ("URL", _SITE, _url, tuple(f".{domain}" for domain in _DOMAINS)),
        ("IP", _IPV6, _ip, (":",)),
        ("IP", rf"{_FIRST_OCTET}(?:\.{_OCTET}){{3}}(?!\w|\.\d)", _ip, (".",)),
        ("ACCOUNT", r"[A-Z](?<!\w.)[A-Z]\d{2}(?:[ -]?[A-Z0-9]){11,30}\b", _iban, ()),
        ("CARD", rf"[2-6]{_FREE}\d{{3}}([ -])\d{{4}}\1\d{{4}}\1\d{{1,7}}{_END}", _card, ()),
        ("CARD", rf"3{_FREE}[47]\d\d([ -])\d{{6}}\1\d{{5}}{_END}", _card, ()),
        ("CARD", rf"[2-6]{_FREE}\d{{12,18}}{_END}", _card, ()),
        # US social security
        ("ACCOUNT", rf"\d{_FREE}\d{{2}}-\d{{2}}-\d{{4}}{_END}", len, ("-",)),
        ("PHONE", _ABROAD, _abroad, ("+",)),
        ("PHONE", rf"[1-9(]{_FREE}{_AREA}\d{{3}}[ .-]\d{{4}}{_END}", len, ()),
        ("PHONE", _AT_HOME, _at_home, ()),
        ("PHONE", rf"[2-9]{_FREE}\d\d-\d{{4}}{_END}", _local_phone, ("-",)),
        ("ACCOUNT", _LONG, _long_number, ()),
    ]
]


def _apart(text: str, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans that touch neither one before nor a placeholder."""
    end = 0
    for start, stop in sorted(spans):
        if start >= end and not _touches_placeholder(text, start, stop):
            yield start, stop
            end = stop


def _touches_placeholder(text: str, start: int, stop: int) -> bool:
    longest = max(map(len, PLACEHOLDERS))
    nearby = _PLACEHOLDER.finditer(text, max(0, start - longest), stop + longest)
    return any(match.start() < stop and start < match.end() for match in nearby)


def presidio_names() -> NameFinder:
    """Finds people's names with Presidio; refuses unless it and a spaCy model are there."""
    if find_spec("presidio_analyzer") is None:
        raise UsageError(
            "Names are scrubbed with Presidio, which is not installed. "
            "Run: pip install 'tightlip[presidio]' && python -m spacy download en_core_web_lg"
        )
    import spacy

    # Presidio would fetch a missing model by itself; a scrubber does not go to the network unasked.
    model = next((name for name in _SPACY_MODELS if spacy.util.is_package(name)), None)
    if model is None:
        raise UsageError(
            "Presidio needs a spaCy model to find names, and none is installed. "
            "Run: python -m spacy download en_core_web_lg"
        )
    return _presidio_finder(model)


def _presidio_finder(model: str) -> NameFinder:
    from presidio_analyzer import AnalyzerEngine
    from presidio_analyzer.nlp_engine import NlpEngineProvider

    described = {"nlp_engine_name": "spacy", "models": [{"lang_code": "en", "model_name": model}]}
    provider = NlpEngineProvider(nlp_configuration=described)
    engine = AnalyzerEngine(nlp_engine=provider.create_engine(), supported_languages=["en"])

    def find(text: str) -> list[tuple[int, int]]:
        spans, start = [], 0
        # spaCy refuses texts of a million characters.
        for piece in pieces(text):
            people = engine.analyze(text=piece, language="en", entities=["PERSON"])
            spans += [(start + person.start, start + person.end) for person in people]
            start += len(piece)
        return spans

    return find
