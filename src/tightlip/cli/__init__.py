"""Flags to one call, what several commands print alike, and gates: --json, --fail-on, --baseline and
--junit, one way to judge what any measuring command found.

Nothing heavy is imported before a command runs.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import typer
from rich.text import Text

from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import read_json, write_text
from tightlip.core.gates import Figures, Known, junit_text, parsed_condition
from tightlip.core.progress import harmless, log, terminal
from tightlip.core.settings import Settings, names_in, setting
from tightlip.core.stores import copied, shown

_BEGAN = time.perf_counter()


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))


def print_lines(lines: Iterable[Any], console: Any = None) -> None:
    """Tables, and sentences that the terminal may break."""
    for line in lines:
        (console or terminal()).print(line, soft_wrap=isinstance(line, str))


def since_start() -> float:
    """Seconds that this command has taken so far, most of them for imports."""
    return time.perf_counter() - _BEGAN


def print_estimate(expected: Any, start_up: float, *, as_json: bool) -> None:
    """What --dry-run found, and what any command takes before it begins."""
    expected = replace(expected, stages={"Start-up": start_up, **expected.stages})
    print_json(expected.record()) if as_json else print_lines(expected.lines())


def say(line: str, console: Any = None) -> None:
    print_lines([line], console)


def print_overview(
    console: Any, headline: str, sentences: Iterable[str], tables: Iterable[Any]
) -> None:
    """A headline in bold, what it comes down to, and tables with room around each."""
    console.print(Text(headline, style="bold"))
    for sentence in sentences:
        console.print(Text(sentence))
    for table in tables:
        console.print()
        console.print(table)
    console.print()


def page_words(page: Path, what: str = "figure") -> str:
    return f"The page, which says what each {what} means: {shown(page)}"


@dataclass(frozen=True, kw_only=True)
class GateSettings(Settings):
    """What becomes of the figures."""

    panel: ClassVar[str | None] = "Gates"

    json: bool = setting(False, "Print the record as JSON, all of it.", flag="--json")
    fail_on: tuple[str, ...] = setting(
        (), "Exit 1 when this holds: 'FIGURE>0', 'FIGURE > baseline'. May be given again."
    )
    baseline: str | None = setting(
        None, "What the same command wrote earlier, for 'baseline' in a condition.", path="REPORT"
    )
    junit: str | None = setting(None, "A file for gates and counts as JUnit reads them.")


class Gate:
    """The gate of one command, checked before its work begins.

    `figures_in` makes figures of what the command wrote earlier, by subject: a model's name where
    there are several. Where what stands under `same` differs between the two records, that is said.
    """

    def __init__(
        self,
        command: str,
        given: dict[str, Any],
        known: Known,
        figures_in: Callable[[Any], Mapping[str, Figures]],
        *,
        record: str,
        same: Sequence[str] = (),
    ) -> None:
        asked = {name: given.pop(name) for name in names_in(GateSettings) if name in given}
        self.settings = GateSettings(**asked)
        self._command, self._known, self._figures_in = command, known, figures_in
        self._same, self._before = same, dict[str, Any]()
        file = None if self.settings.junit is None else Path(self.settings.junit)
        if file and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
            raise UsageError(
                f"--junit {file} cannot be written. Give a file in a folder that is yours."
            )
        self._conditions = [parsed_condition(each, known) for each in self.settings.fail_on]
        self._baseline = self._earlier(record)
        if self._baseline is None and any(one.limit is None for one in self._conditions):
            raise UsageError(
                "A condition names the baseline, and there is none. Give --baseline REPORT."
            )

    def _earlier(self, record: str) -> Mapping[str, Figures] | None:
        if self.settings.baseline is None:
            return None
        path = Path(copied(self.settings.baseline))
        file = path / record if path.is_dir() else path
        try:
            self._before = read_json(file)
            return self._figures_in(self._before)
        except (DamagedError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                f"--baseline {path} is not what tightlip {self._command} writes ({file.name}), or is damaged. Give the folder of an earlier one."
            ) from error

    def judge(self, record: Any, shown: Callable[[], object]) -> None:
        """Print the record or what is `shown`, write what was asked for, and exit 1 on a failure."""
        from tightlip.report.kit.table import at  # with Jinja, which --help need not wait for

        for name in self._same if self._baseline is not None else ():
            there = at(*name.split("."))
            if there(self._before) != there(record):
                log.warning(
                    "The baseline has another %s, so its figures may differ for that.", name
                )
        judged = self._figures_in(record)
        failed: dict[tuple[str, str], str | None] = {}
        for subject, figures in judged.items():
            before = self._of_baseline(subject)
            for each in self._conditions:
                failed[subject, each.written] = each.failure(figures, self._known, before)
        if self.settings.junit is not None:
            text = junit_text(self._command, judged, failed)
            write_text(Path(self.settings.junit), text, alone=True)
        # Last: whoever reads only the first lines of it must not lose the gate.
        if self.settings.json:
            print(json.dumps(record, indent=2, ensure_ascii=False))
        else:
            shown()
        reasons = [(subject, why) for (subject, _), why in failed.items() if why]
        for subject, why in reasons:
            line = f"{subject}: {why}" if subject else why
            print(f"tightlip: failed on {harmless(line)}", file=sys.stderr)
        if reasons:
            raise typer.Exit(1)

    def _of_baseline(self, subject: str) -> Figures | None:
        """The same subject's earlier figures, or those of the only one there was."""
        before = self._baseline or {}
        return next(iter(before.values())) if len(before) == 1 else before.get(subject)
