"""The comparison as one HTML file: no network, no script, no text and nobody's name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tightlip.core.figures import counted
from tightlip.report.comparison.plots import (
    exposure_scatter,
    kind_of,
    num_undrawn,
    repetition_plots,
    unique_scatter,
)
from tightlip.report.comparison.table import (
    RunFigures,
    comparison_table,
    membership_score,
    repetition_table,
)
from tightlip.report.comparison.words import headline, missing, tolerance_words, uncounted

SCORE_WORDS = {"loss": "the loss", "reference": "the loss beside the reference model's"}


class Matching(Protocol):
    """When two runs count as equally useful."""

    @property
    def tolerance(self) -> float: ...
    @property
    def at_perplexity(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class ComparisonPage:
    """The page of a comparison.

    Holds:
        said: every verdict on comparability and every reason for a missing figure is on it.
    """

    files: ClassVar[str] = "report/comparison/page"
    rows: Sequence[RunFigures]
    matching: Matching
    notes: Sequence[str] = ()
    version: str | None = None

    def content(self) -> dict[str, Any]:
        rows, tolerance = self.rows, self.matching.tolerance
        sentence, weighing = headline(rows)
        undrawn = num_undrawn(rows)
        return {
            "headline": sentence,
            "version": self.version,
            "rows": rows,
            "kinds": [kind_of(row) for row in rows],
            "weighing": weighing,
            "remarks": self.notes,
            "table": comparison_table(rows),
            "tolerance": tolerance_words(tolerance),
            "at_perplexity": self.matching.at_perplexity,
            "missing": missing(rows),
            "uncounted": uncounted(rows),
            "score": SCORE_WORDS[membership_score(rows)],
            "exposure_plot": exposure_scatter(rows, tolerance),
            "unique_plot": unique_scatter(rows, tolerance),
            "undrawn": f"{counted(undrawn, 'run')} without a perplexity on the baseline's held-out text cannot be drawn."
            if undrawn
            else "",
            "repetition_plots": repetition_plots(rows),
            "repetitions": repetition_table(rows),
        }
