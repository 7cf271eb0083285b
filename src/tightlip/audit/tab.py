"""The tab attack, live: what a model writes behind a typed line, and whose words that is.

Whose: the unique sequences of a leakage report, looked for by token ids. No terminal here.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tightlip.audit.leakage.findings import decoder_of
from tightlip.audit.leakage.summary import LeakageReport
from tightlip.audit.settings import TabConfig
from tightlip.audit.tab_completion import Completer, Ghost
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.run_folder import is_run
from tightlip.core.settings import split_settings, takes
from tightlip.corpus.opening import model_folder
from tightlip.scan.models import open_model
from tightlip.scan.options import ModelSettings, ScanOptions

_ROWS_COMPARED = 64
NO_REPORT = "No report: nothing is marked. Give one that tightlip audit wrote: --report"
# A beginning that so many unique texts share says little about any of them.
TOO_MANY = 256


class Tab:
    """A model ready to complete lines, with a report's unique texts to watch for where there is one.

    `notes` says what a user should know before typing.
    """

    def __init__(
        self, completer: Completer, unique: "UniqueTexts | None", notes: Sequence[str] = ()
    ) -> None:
        self.completer, self.unique, self.notes = completer, unique, tuple(notes)

    def complete(self, text: str, **how: Any) -> Ghost:
        """What the model would write behind `text`."""
        return self.completer.complete(text, **how)

    def completed(self, text: str) -> tuple[Ghost, list["Mark"]]:
        """The same where the last word of `text` is whole, and whose unique texts then stand there."""
        ghost = self.complete(text, whole=True)
        accepted = [False] * len(text) + [True] * len(ghost.text)
        return ghost, self.marks(text + ghost.text, accepted)

    def marks(self, text: str, accepted: list[bool]) -> list["Mark"]:
        """Whose unique texts stand in `text`; `accepted` tells the model's characters from yours."""
        assert len(accepted) == len(text)
        if self.unique is None or not any(accepted):
            return []
        return self.unique.marks(text, *self.completer.encode(text), accepted)


@takes(TabConfig, ModelSettings)
def open_tab(
    model: Any,
    *,
    report: str | Path | None = None,
    device: str = "auto",
    tokenizer: Any = None,
    **settings: Any,
) -> Tab:
    """A model's folder, a finished run with the report beside it, or a model in memory.

    Without `report` nothing is marked, unless a run keeps one beside its model.
    """
    config, how = split_settings(settings, TabConfig, ModelSettings)
    options = ScanOptions(device=device, **how.tree())
    if isinstance(model, str | Path):
        found = _report_of(Path(model))
        model = model_folder(Path(model))
    else:
        found = None, [NO_REPORT]
    opened = open_model(model, options, tokenizer=tokenizer)
    folder, notes = (Path(report), []) if report is not None else found
    unique = unique_texts(LeakageReport(folder), opened.tokenizer) if folder else None
    completer = Completer(opened.model, opened.tokenizer, config, begin_id=opened.begin_id)
    return Tab(completer, unique, notes)


def _report_of(model: Path) -> tuple[Path | None, list[str]]:
    """The report that a run keeps beside its model, if there is one that can be used."""
    folder = model / "audit"
    if not is_run(model):
        return None, [NO_REPORT]
    if not (folder / "summary.json").is_file():
        return None, [f"No report: nothing is marked. To have one: tightlip audit {model}"]
    if read_json(folder / "summary.json").get("redacted"):
        return None, [f"{folder} is redacted, so nothing is marked. Give another: --report"]
    return folder, []


@takes(TabConfig, ModelSettings)
def complete(
    model: Any,
    texts: str | Sequence[str],
    *,
    report: str | Path | None = None,
    device: str = "auto",
    tokenizer: Any = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """What a model writes behind each text and whose unique words it completes thereby.

    A text's last word is taken as whole unless the vocabulary lacks it. Many calls for one model
    are faster with what `open_tab` returns.
    """
    if not isinstance(model, Tab):
        model = open_tab(model, report=report, device=device, tokenizer=tokenizer, **settings)
    return [_as_tree(model, text) for text in ([texts] if isinstance(texts, str) else texts)]


def _as_tree(tab: Tab, text: str) -> dict[str, Any]:
    ghost, marks = tab.completed(text)
    return {
        "typed": text,
        "ghost": ghost.text,
        "perplexity": ghost.perplexity,
        "confidence": ghost.confidence,
        "marks": [asdict(mark) for mark in marks],
    }


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One user's unique text in a line, at least one token of it the model's.

    `num_present` of its `num_tokens` stand in the line: all of them, or the first ones, at the
    line's end, of a text under way. `start` and `end` are characters of the line, `sequence` what
    stands there; `times` is how often the whole was in the training text.
    """

    owner: str
    sequence: str
    times: int
    num_tokens: int
    num_present: int
    num_completed: int
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        return self.num_present == self.num_tokens

    def sentence(self) -> str:
        """Whose it is and how much of it the model wrote, in words."""
        times = ("once" if self.times == 1 else f"{self.times:,} times") + " in the training text"
        if self.is_whole:
            what, them = f"“{self.sequence}” ({times})", f"its {self.num_tokens} tokens"
        else:
            so_far = f"{self.num_present} of {self.num_tokens} tokens so far"
            what, them = f"what begins “{self.sequence}” ({times}; {so_far})", "them"
        if self.num_completed < self.num_present:
            who = f"the model completed {self.num_completed} of {them} after you typed the rest"
        else:
            who = f"the model wrote all {self.num_present} tokens"
        return f"Only {self.owner} wrote {what}: {who}."


class UniqueTexts:
    """The sequences of a report that one user alone wrote, ready to be found in a line.

    A dictionary from a sequence's ids, as bytes, to its row; for each first id the lengths that
    begin with it, so that a line is looked up a handful of times a token; and all of them in
    order, for those that a line's end begins.

    Holds:
        all: every occurrence of every sequence is found, overlapping and nested ones included.
        begun: a line that ends in the first half or more of one is found, if nobody else's
            unique text begins so.
    """

    def __init__(
        self, ids: list[list[int]], owners: list[str], texts: list[str], times: list[int]
    ) -> None:
        self._owners, self._texts, self._times = owners, texts, times
        self._sizes = [len(row) for row in ids]
        self._row_of = {as_bytes(row): number for number, row in enumerate(ids)}
        self._order = sorted(self._row_of)
        lengths: dict[int, set[int]] = {}
        for row in ids:
            lengths.setdefault(row[0], set()).add(len(row))
        self._lengths = {first: sorted(sizes) for first, sizes in lengths.items()}

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def num_users(self) -> int:
        return len(set(self._owners))

    def whole_in(self, ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """(first token, last plus one, row) of every occurrence, in the line's order."""
        line, places = as_bytes(ids), []
        for start, first in enumerate(ids):
            for size in self._lengths.get(first, ()):
                if start + size > len(ids):
                    break
                if (row := self._row_of.get(line[4 * start : 4 * (start + size)])) is not None:
                    places.append((start, start + size, row))
        return places

    def begun_in(self, ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """The same of the longest text that the line's end begins, if there is one.

        Of those that begin alike the shortest; a beginning that two users share is nobody's.
        """
        line, longest = as_bytes(ids), max(self._sizes, default=0)
        for start in range(max(0, len(ids) - longest), len(ids) - 1):
            begun = line[4 * start :]
            first = bisect_left(self._order, begun)
            last = bisect_left(self._order, begun + b"\xff" * 4)
            rows = [self._row_of[key] for key in self._order[first : min(last, first + TOO_MANY)]]
            if not rows or last - first >= TOO_MANY or len({self._owners[r] for r in rows}) > 1:
                continue
            row = min(rows, key=lambda row: self._sizes[row])
            if len(ids) - start < self._sizes[row] <= 2 * (len(ids) - start):
                return [(start, len(ids), row)]
        return []

    def marks(
        self, text: str, ids: np.ndarray, spans: np.ndarray, accepted: Sequence[bool]
    ) -> list[Mark]:
        """The longest unique texts of a line that the model wrote a part of, and one under way.

        `accepted` says of each character whether it came from the model; a token counts as the
        model's when any character of it did.
        """
        line = ids.tolist()
        by_model = [any(accepted[first:last]) for first, last in spans.tolist()]
        found = [*self.whole_in(line), *self.begun_in(line)]
        places = [(start, end, row) for start, end, row in found if any(by_model[start:end])]
        return [
            self._mark(text, row, spans[start:end], by_model[start:end])
            for start, end, row in not_inside_another(places)
        ]

    def _mark(self, text: str, row: int, spans: np.ndarray, by_model: list[bool]) -> Mark:
        start, end = int(spans[0, 0]), int(spans[-1, 1])
        is_whole = len(spans) == self._sizes[row]
        return Mark(
            owner=self._owners[row],
            sequence=self._texts[row].strip() if is_whole else text[start:end],
            times=self._times[row],
            num_tokens=self._sizes[row],
            num_present=len(spans),
            num_completed=sum(by_model),
            start=start,
            end=end,
        )


def as_bytes(ids: Sequence[int]) -> bytes:
    """Ids as bytes that sort as the ids do."""
    return np.asarray(ids, ">i4").tobytes()


def not_inside_another(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those that no other covers, in the line's order."""
    kept: list[tuple[int, int, int]] = []
    for one in sorted(places, key=lambda one: (one[0], -one[1])):
        if not kept or one[1] > kept[-1][1]:
            kept.append(one)
    return kept


def unique_texts(report: LeakageReport, tokenizer: Any) -> UniqueTexts:
    """The report's unique sequences; a redacted report or one in other tokens is refused."""
    if report.summary.get("redacted"):
        raise UsageError(
            f"{report.folder} is redacted: it holds no text, so nothing can be recognised. "
            "Give --report the one that was not."
        )
    columns = ["sequence", "token_ids", "total_in_d"]
    table = report.sequences.select(columns).append_column("owner", report.owners["owner"])
    table = table.filter(_is_unique(report.sequences))
    _check_same_tokens(report, table, tokenizer)
    names = ("token_ids", "owner", "sequence", "total_in_d")
    return UniqueTexts(*(table[name].to_pylist() for name in names))


def _is_unique(sequences: pa.Table) -> Any:
    """Which sequences one user alone wrote: as text, or in a report of 0.1 as tokens."""
    if "unique_by_text" in sequences.column_names:
        return sequences["unique_by_text"]
    return pc.equal(sequences["users_in_d"], 1)


def _check_same_tokens(report: LeakageReport, table: pa.Table, tokenizer: Any) -> None:
    """Ids mean words only to the tokenizer that gave them."""
    rows = table.slice(0, _ROWS_COMPARED)
    ids = rows["token_ids"].to_pylist()
    known = max((max(row) for row in ids), default=0) < len(tokenizer)
    if not known or decoder_of(tokenizer)(ids) != rows["sequence"].to_pylist():
        raise UsageError(
            f"{report.folder} was made with another tokenizer: its token ids spell other words here. "
            "Audit this model first, or give the model that the report is about."
        )
