"""The experiment of private representations as one HTML file, and as tables in the terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tightlip.core.figures import counted, rounded_up
from tightlip.experiments.vectors_tables import name_of, promise_of, strongest_words, tables
from tightlip.report.kit.words import share_words

if TYPE_CHECKING:
    from rich.table import Table as RichTable

PAPER_NOTE = (
    "Theirs: BERT base, fine-tuned, five runs (Lyu, He and Li 2020). Their blogs are not ours: topics come from an LDA of "
    "each, so only orders and distances can be compared there."
)


def headline(result: dict[str, Any]) -> str:
    """What the experiment says in one sentence, from its first corpus."""
    section = result["corpora"][0]
    plain = next(row for row in section["rows"] if row["way"] == "none")
    private = _smallest(section)
    whole = rounded_up(private["guarantee"]["epsilon"])
    return (
        f"Noise of ε {private['epsilon']:g} a coordinate, which is {whole} for the whole vector and any two texts, brings the "
        f"main task from {_percent(plain['main'])} to {_percent(private['main'])} (majority class "
        f"{_percent(section['majority']['main'])}; {_seeds(result)})."
    )


def certainty(result: dict[str, Any]) -> str:
    """How far chance is told of in the tables: which figures have a spread, and which do not."""
    if result["num_seeds"] == 1:
        return (
            "Every figure of ours, here and in the tables, is of one seed and has no interval: differences of some points "
            "may be chance."
        )
    return (
        f"Ours are means over {result['num_seeds']} seeds; ± is the standard deviation between them and does not cover the "
        "choice of test texts. Table 5 and the gaps of tables 6 and 7 have neither spread nor interval."
    )


def _seeds(result: dict[str, Any]) -> str:
    return "one seed" if result["num_seeds"] == 1 else f"means over {result['num_seeds']} seeds"


def findings(section: dict[str, Any]) -> Iterator[str]:
    """What one corpus shows, in sentences."""
    plain = next(row for row in section["rows"] if row["way"] == "none")
    private = _smallest(section)
    least = section["majority"]["privacy"]["mlp"]["mean"]
    for row in (plain, private):
        left = row["privacy"]["strongest"]
        yield (
            f"{name_of(row)}: the strongest attacker ({strongest_words(row)}) leaves {_percent(left)} empirical privacy; "
            f"guessing leaves {100 * least:.1f}%."
        )
    for way in ("laplace", "gaussian"):
        for row in (one for one in section["rows"] if one["way"] == way):
            yield f"{name_of(row)} of the whole vector, any two texts: main task {_percent(row['main'])}."
    if section["num_seen_in_train"]:
        yield (
            f"{section['num_seen_in_train']:,} of {section['num_test']:,} test texts also stand in train. Without them: "
            f"non-private {_percent(plain['main_unseen'])}, {name_of(private)} {_percent(private['main_unseen'])}."
        )


def about(section: dict[str, Any]) -> str:
    users = section["num_test_users"]
    by = "" if users is None else f" by {counted(users, 'writer')}"
    return (
        f"{section['about']} {counted(section['num_train'], 'text')} to train on, {section['num_test']:,} to test{by}; vectors "
        f"of {section['dimensions']} coordinates. Label: {section['label']}. Private: {', '.join(section['private'])}."
    )


@dataclass(frozen=True, kw_only=True)
class VectorsPaperPage:
    """The page of the experiment.

    Holds:
        standing: every way's promise stands with its standing.
    """

    files: ClassVar[str] = "experiments/vectors"
    result: dict[str, Any]

    def content(self) -> dict[str, Any]:
        result = self.result
        sections = [
            {
                "name": section["name"],
                "about": about(section),
                "findings": list(findings(section)),
                "tables": tables(section),
                "promises": [(name_of(row), promise_of(row)) for row in section["rows"]],
            }
            for section in result["corpora"]
        ]
        return {
            "headline": headline(result),
            "version": result["version"],
            "result": result,
            "certainty": certainty(result),
            "sections": sections,
            "paper_note": PAPER_NOTE,
        }


def terminal_tables(section: dict[str, Any]) -> "list[RichTable]":
    return [table.printed() for table in tables(section)]


def _smallest(section: dict[str, Any]) -> dict[str, Any]:
    rows = [row for row in section["rows"] if row["way"] == "dpnr" and not row["dropout"]]
    return min(rows, key=lambda row: float(row["epsilon"]))


def _percent(figure: dict[str, Any]) -> str:
    return share_words({"value": figure["mean"]})
