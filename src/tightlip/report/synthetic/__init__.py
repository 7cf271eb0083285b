"""Generated text beside what people wrote: one page, and the same figures for the terminal."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup, escape

from tightlip.core.checksums import checked
from tightlip.core.figures import UNKNOWN, count, counted, number, percent
from tightlip.core.files import read_json
from tightlip.core.progress import harmless
from tightlip.report.kit.table import NAMES, Cell, Column, Row, Table, plain_row

NUM_STRETCHES, NUM_PEOPLE, NUM_HEADLINES = 300, 100, 4
MOST_CHARACTERS, NAME_CHARACTERS = 900, 80
NO_CONTROL = (
    "No control was given, so common phrases cannot be told from copies. With --control CORPUS, text of people who were not "
    "in, the report says how much of strangers' text stands there too."
)
Figures = dict[str, Any]


def verdict(summary: Figures) -> str:
    """The report in one sentence."""
    if not (both := summary["copies"] + summary["near_copies"]):
        return f"No stretch of {summary['min_words']} words or more is one person's alone"
    stretches = counted(both, "stretch", "stretches")
    people = counted(summary["people_affected"], "person", "people")
    affected = "is" if summary["people_affected"] == 1 else "are"
    return f"The text repeats {stretches} that one person alone wrote; {people} {affected} affected"


def weighed(summary: Figures) -> str:
    """Whether that is more than of strangers, in words."""
    if (control := summary["control"]) is None:
        return NO_CONTROL
    found = f"{count(summary['copies_not_in_control'])} word for word that nobody in the control wrote"  # fmt: skip
    shares = [percent(side["share_affected"]["value"]) for side in (summary, control)]
    affected = f"Of the corpus' people {shares[0]} have a copy or a near copy, of the control's {shares[1]}."
    return " ".join([f"{found}{_on_average(summary)}", affected, *_by_length(summary)])


def _on_average(summary: Figures) -> str:
    """What the ratio says: how much more on average over people, however long."""
    ratio, longer = summary["ratio"], summary["copies_longer_than_control"]
    if ratio["low"] is None:
        return ". With one person on a side nothing can be said about averages."
    chance = f"; at the control's rate one would expect {_with_ends(summary['expected'])}."
    if ratio["low"] > 1:
        least = f"at least {number(ratio['low'])} times"
        return f"{chance} On average over people that is {least} as much as of those who were not in: copied, not chance."
    if ratio["value"] is None:
        return "; of the control's people the text has nothing word for word that is theirs alone."
    if ratio["high"] is not None and ratio["high"] < 1:
        return f"{chance} On average over people strangers' text is repeated more: is the control of the same kind, and were its people really not in?"
    is_common = not longer and not _is_told_by_length(summary)
    common = ": this may be no more than common phrases" if is_common else ""
    return f"{chance} On average over people the interval of the ratio holds 1{common}."


def _is_told_by_length(summary: Figures) -> bool:
    return bool(summary.get("by_length") and summary["by_length"]["p_value"] < 0.05)


def _by_length(summary: Figures) -> Iterator[str]:
    """What is too long for a common phrase: of too many people, or however few wrote it."""
    if _is_told_by_length(summary):
        told = summary["by_length"]
        yield (
            f"{counted(told['people'], 'person', 'people')} in the corpus and {told['control']:,} in the control have a stretch "
            f"of {told['words']:,} words or more, which chance does in at most {percent(told['p_value'])} of cases: copied."
        )
    if longer := summary["copies_longer_than_control"]:
        longest = summary["control"]["longest_alone"]
        bar = summary["control"].get("longest_but_one", longest)
        but = f", but for one person with {counted(longest, 'word')}" if longest > bar else ""
        beside = f"any that is the control's people's alone (longest {counted(bar, 'word')}{but})"
        if not bar:
            least = counted(summary["min_words"], "word")
            beside = f"{least}, and the control's people have none{but}"
        verb, read = ("is", "it for a copy until you have read it") if longer == 1 else ("are", "these for copies until you have read them")  # fmt: skip
        yield f"{counted(longer, 'stretch', 'stretches')} {verb} longer than {beside}: take {read}."


def _with_ends(figure: Figures | None) -> str:
    if figure is None:
        return UNKNOWN
    value, low, high = (number(figure[name]) for name in ("value", "low", "high"))
    if figure["low"] is None:
        return value
    if figure["value"] is None:
        return f"over {low}"
    return f"{value} (at least {low})" if figure["high"] is None else f"{value} ({low} to {high})"


def lines_of(summary: Figures) -> list[tuple[str, str, str]]:
    """(name, value, what it means) of each figure, the four that matter most first."""
    least, near = summary["min_words"], f"{100 * summary['near']:g}%"
    documents = f"of {counted(summary['synthetic_documents'], 'document')}"
    return [
        ("Copies", count(summary["copies"]), f"Different stretches of {least} words or more that stand in the text word for word and that one person alone wrote."),
        ("Near copies", count(summary["near_copies"]), f"The same with up to {near} of their words changed, around {summary['core_words']} words or more that one person alone wrote."),
        ("People affected", count(summary["people_affected"]), f"Of {counted(summary['num_users'], 'person', 'people')} those with a copy or a near copy."),
        ("Documents affected", count(summary["documents_affected"]), f"Generated documents with one, {documents}; documents.parquet lists them all."),
        ("Longest copy", counted(summary["longest"], "word"), "The longest stretch word for word."),
        ("Longest near copy", counted(summary["longest_near"], "word"), "The longest stretch with words changed."),
        ("Share of the text", percent(summary["copied_share"]), f"Of its {counted(summary['synthetic_words'], 'word')}, those that lie in a copy or a near copy."),
        ("Shared stretches", count(summary["shared"]), "As long, word for word, but several people wrote them: nobody's own."),
    ]  # fmt: skip


def compared(summary: Figures) -> Table | None:
    """The people who were in beside those who were not."""
    if (control := summary["control"]) is None:
        return None

    def counts(name: str, key: str) -> Row:
        return plain_row(name, count(summary[key]), count(control[key]))

    def figure(name: str, key: str, words: Any) -> Row:
        cells = []
        for one in (summary[key], control[key]):
            under = "" if one["low"] is None else f"{words(one['low'])} to {words(one['high'])}"
            cells.append(Cell(words(one["value"]), under))
        return Row(name, cells)

    rows = [
        counts("People", "num_users"),
        counts("Words", "num_words"),
        counts("Copies", "copies"),
        counts("Near copies", "near_copies"),
        figure("Copies per 1,000 words", "per_thousand_words", number),
        figure("People with any", "share_affected", percent),
        counts("Longest, words", "longest_alone"),
    ]
    return Table(columns=[NAMES, Column("corpus"), Column("control")], rows=rows, beside=True)


def terminal_lines(summary: Figures) -> Iterator[Any]:
    """The sentence, the figures and the comparison."""
    yield f"{verdict(summary)}."
    styles = [NAMES, Column(style="bold", wraps=False), Column(left=True, style="dim")]
    yield Table(columns=styles, rows=[plain_row(*line) for line in lines_of(summary)]).printed()
    if (table := compared(summary)) is not None:
        yield table.printed()
    yield weighed(summary)
    yield from summary["notes"]


@dataclass(frozen=True, kw_only=True)
class SyntheticPage:
    """The page of a report's folder.

    Holds:
        small: the longest stretches and the people with most, cut where they are long.
        silent: redacted, it holds none of the text and nobody's name.
    """

    files: ClassVar[str] = "report/synthetic/page"
    folder: Path

    def content(self) -> dict[str, Any]:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        summary = read_json(self.folder / "summary.json")
        stretches = pq.read_table(checked(self.folder / "stretches.parquet"))
        users = pq.read_table(checked(self.folder / "users.parquet"))
        affected = users.filter(pc.greater(users["longest"], 0))
        order = [(name, "descending") for name in ("copies", "near_copies", "longest")]
        lines = lines_of(summary)
        return {
            "headline": verdict(summary),
            "weighing": weighed(summary),
            "version": summary["version"],
            "summary": summary,
            "headlines": lines[:NUM_HEADLINES],
            "lines": lines[NUM_HEADLINES:],
            "ratio": _with_ends(summary["ratio"]),
            "expected": _with_ends(summary["expected"]),
            "compared": compared(summary),
            "stretches": [_shown(row) for row in stretches.slice(0, NUM_STRETCHES).to_pylist()],
            "num_stretches": len(stretches),
            "users": [
                row | {"user": _name(row["user"])}
                for row in affected.sort_by(order).slice(0, NUM_PEOPLE).to_pylist()
            ],
            "num_affected": len(affected),
        }


def _name(name: str) -> str:
    return harmless(name)[:NAME_CHARACTERS]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    names = ("text", "written")
    texts: list[Any] = [row[name] and harmless(" ".join(row[name].split())) for name in names]
    if None not in texts:
        texts = [*marked(*texts)]
    shown = dict(zip(names, texts, strict=True))
    return row | shown | {"owners": [_name(owner) for owner in row["owners"][:3]], "num_owners": len(row["owners"])}  # fmt: skip


def marked(one: str, other: str) -> tuple[Markup, Markup]:
    """Two texts with the words marked in which they differ, cut where they are long.

    >>> marked("see you at 5", "see you at 6 pm")[1]
    Markup('see you at <mark>6 pm</mark>')
    """
    words = [re.split(r"(\s+)", text[:MOST_CHARACTERS]) for text in (one, other)]
    sides: tuple[list[Markup], list[Markup]] = ([], [])
    for kind, a, b, c, d in SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, part in zip(sides, ("".join(words[0][a:b]), "".join(words[1][c:d])), strict=True):
            text = escape(part)
            side.append(text if kind == "equal" or not part.strip() else Markup(f"<mark>{text}</mark>"))  # fmt: skip
    return Markup("").join(sides[0]), Markup("").join(sides[1])
