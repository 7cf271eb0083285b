"""The comparison as one HTML file: no network, no script, no text and nobody's name."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

from markupsafe import Markup, escape

from tightlip.core.figures import count, counted, number
from tightlip.report.comparison.plots import (
    exposure_scatter,
    kind_of,
    num_undrawn,
    repetition_plots,
    unique_scatter,
)
from tightlip.report.comparison.table import Row, exposure_at, membership_score, table_lines
from tightlip.report.comparison.words import MEANINGS, headline, missing, tolerance_words, uncounted
from tightlip.report.kit import asset, policy, template


class Matching(Protocol):
    """When two runs count as equally useful."""

    @property
    def tolerance(self) -> float: ...
    @property
    def at_perplexity(self) -> float | None: ...


def render_comparison(
    rows: Sequence[Row],
    matching: Matching,
    *,
    notes: Sequence[str] = (),
    version: str | None = None,
) -> str:
    """The page of a comparison, as text.

    Holds:
        alone: it names no other file and no address, and runs no script.
        said: every verdict on comparability and every reason for a missing figure is on it.
    """
    style = asset("report/kit/page.css") + asset("report/kit/tables.css")
    sentence, weighing = headline(rows)
    return str(
        template("report/comparison/page.html.jinja").render(
            style=Markup(style),
            policy=policy(style),
            rows=rows,
            verdicts=[with_flags(" ".join(row["verdicts"])) for row in rows],
            kinds=[kind_of(row) for row in rows],
            headline=sentence,
            weighing=with_flags(weighing),
            notes=notes,
            version=version,
            lines=table_lines(rows),
            tolerance=tolerance_words(matching.tolerance),
            at_perplexity=matching.at_perplexity,
            missing=[with_flags(reason) for reason in missing(rows)],
            uncounted=[with_flags(sentence) for sentence in uncounted(rows)],
            meanings=MEANINGS,
            score={"loss": "the loss", "reference": "the loss beside the reference model's"}[
                membership_score(rows)
            ],
            **_plots(rows, matching.tolerance),
            **_repetitions(rows),
        )
    )


def with_flags(sentence: str) -> Markup:
    """The sentence with its flags set as code, so that no line breaks inside one.

    >>> with_flags("a < b, see --key FILE")
    Markup('a &lt; b, see <code class="flag">--key FILE</code>')
    """
    flag = re.compile(r"--[a-z][a-z-]*(?: (?:[0-9][0-9.]*[0-9]|[0-9]|[A-Z]+\b))?")
    return Markup(flag.sub(r'<code class="flag">\g<0></code>', str(escape(sentence))))


def _plots(rows: Sequence[Row], tolerance: float) -> dict[str, Any]:
    undrawn = num_undrawn(rows)
    return {
        "exposure_plot": exposure_scatter(rows, tolerance),
        "unique_plot": unique_scatter(rows, tolerance),
        "undrawn": f"{counted(undrawn, 'run')} without a perplexity on the baseline's held-out text cannot be drawn."
        if undrawn
        else "",
    }


def _repetitions(rows: Sequence[Row]) -> dict[str, Any]:
    """The small plots, and the same figures as a table: one line for each repetition count."""
    times = sorted({group["repetitions"] for row in rows for group in row["exposure"]})
    known = [row for row in rows if row["exposure"]]
    return {
        "repetition_plots": repetition_plots(rows),
        "repetition_names": [row["name"] for row in known],
        "repetition_rows": [
            (f"{one:,}×", [_exposure_cell(exposure_at(row, one)) for row in known]) for one in times
        ],
    }


def _exposure_cell(group: Row | None) -> tuple[str, str]:
    if group is None:
        return "–", ""
    exposed = f"{count(group['num_exposed'])} of {count(group['num_canaries'])} exposed"
    return number(group["mean_bits"]), exposed
