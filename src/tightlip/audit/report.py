"""A finished leakage report as an object: its figures, its tables, a view for notebooks."""

from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.audit.summary import failed_conditions
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json

_HEADLINES = {
    "unique": "sequences that one user alone wrote and the model completes",
    "users_with_unique": "users who own one",
    "leakage_epsilon": "largest PP_public / PP_lm among them",
    "public_unique": "the same count for the public model",
    "perplexity": "on the corpus",
    "validation_perplexity": "on held-out text",
    "accuracy": "top-k, on the corpus",
}


class LeakageReport:
    """What an audit found. Every key of summary.json is an attribute: `report.unique`."""

    def __init__(self, folder: Path, keep_alive: Any = None) -> None:
        if not (folder / "summary.json").exists():
            raise UsageError(
                f"{folder} holds no finished report (no summary.json). Run: tightlip audit"
            )
        self.folder = folder
        self.summary: dict[str, Any] = read_json(folder / "summary.json")
        # A report made without `out` lives in a temporary folder for as long as this object does.
        self._keep_alive = keep_alive

    def __getattr__(self, name: str) -> Any:
        if name != "summary" and name in self.__dict__.get("summary", {}):
            return self.summary[name]
        raise AttributeError(f"a leakage report has no {name!r}")

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self.summary])

    @cached_property
    def sequences(self) -> pa.Table:
        """One row per distinct sequence, worst first, as Arrow."""
        return pq.read_table(self.folder / "sequences.parquet")

    @cached_property
    def owners(self) -> pa.Table:
        """Row for row beside `sequences`: the one user who wrote it, or null."""
        return pq.read_table(self.folder / "owners.parquet")

    @cached_property
    def users(self) -> pa.Table:
        """One row per user: how much they wrote, how much of it alone the model completes."""
        return pq.read_table(self.folder / "users.parquet")

    def to_pandas(self) -> Any:
        """The sequences with their owners as a pandas DataFrame."""
        return self.sequences.append_column("owner", self.owners["owner"]).to_pandas()

    def failed(self, *conditions: str) -> list[str]:
        """Which of 'unique>0' and the like hold, each with its figure: empty means all is well."""
        return failed_conditions(self.summary, conditions)

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={_short(self.summary.get(name))}" for name in _HEADLINES)
        return f"LeakageReport({figures}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td>{_short(self.summary.get(name))}</td>"
            f"<td style='text-align:left'>{words}</td></tr>"
            for name, words in _HEADLINES.items()
        )
        leaked = "".join(
            f"<tr><td style='text-align:left'>{escape(_text_of(row))}</td>"
            f"<td>{row['users_in_d']}</td><td>{_short(row['ratio'])}</td></tr>"
            for row in self.sequences.slice(0, 8).to_pylist()
        )
        head = "<tr><th>sequence</th><th>users in D</th><th>ratio</th></tr>"
        return f"<table>{rows}</table><table>{head}{leaked}</table>"


def _text_of(row: dict[str, Any]) -> str:
    return row["sequence"] if row["sequence"] is not None else f"{row['num_tokens']} tokens"


def _short(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
