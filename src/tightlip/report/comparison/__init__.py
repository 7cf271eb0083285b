"""The comparison as one HTML file: no network, no script, no text and nobody's name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tightlip.report.comparison.plots import (
    exposure_scatter,
    kind_of,
    leaks_scatter,
    num_undrawn,
    repetition_plots,
)
from tightlip.report.comparison.table import (
    RunFigures,
    comparison_table,
    membership_score,
    repetition_table,
    score_table,
)
from tightlip.report.comparison.words import headline, missing, tolerance_words, uncounted

SCORE_WORDS = {"loss": "the loss", "reference": "the loss beside the reference model's"}


@dataclass(frozen=True, kw_only=True)
class ComparisonPage:
    """The page of a comparison.

    Holds:
        complete: every verdict on comparability and every reason for a missing figure is on it.
    """

    files: ClassVar[str] = "report/comparison/page"
    rows: Sequence[RunFigures]
    tolerance: float  # within which two runs count as equally useful
    at_perplexity: float | None = None
    notes: Sequence[str] = ()
    version: str | None = None

    def content(self) -> dict[str, Any]:
        rows = self.rows
        sentence, weighing = headline(rows)
        return {
            "headline": sentence,
            "version": self.version,
            "rows": rows,
            "kinds": [kind_of(row) for row in rows],
            "weighing": weighing,
            "remarks": self.notes,
            "table": comparison_table(rows),
            "tolerance": tolerance_words(self.tolerance),
            "at_perplexity": self.at_perplexity,
            "missing": missing(rows),
            "uncounted": uncounted(rows),
            "scores": score_table(rows),
            "score": SCORE_WORDS[membership_score(rows)],
            "exposure_plot": exposure_scatter(rows, self.tolerance),
            "leaks_plot": leaks_scatter(rows, self.tolerance),
            "num_undrawn": num_undrawn(rows),
            "repetition_plots": repetition_plots(rows),
            "repetitions": repetition_table(rows),
        }
