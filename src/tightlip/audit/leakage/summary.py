"""The report's headline figures, and the gate that fails on them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.audit.leakage.by_text import ByText
from tightlip.audit.leakage.leaks import Fit, Leaks, PublicView
from tightlip.audit.leakage.tables import report_order
from tightlip.audit.settings import CONTEXTS, LeakageConfig
from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.gates import Entries, Known, failures
from tightlip.corpus.rendered import ROLES

if TYPE_CHECKING:
    from tightlip.scan.models import OpenedModel

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# What a gate may ask for: the numbers of summary.json, and the tables of numbers within it.
_NUMBERS = (
    *("accuracy", "distinct_sequences", "fewer_than_p"),
    *("leakage_epsilon", "leakage_epsilon_sequence", "leaks", "num_documents", "num_tokens"),
    *("num_users", "p", "people_affected", "perplexity"),
    *("public_unique", "sequences_in_s", "top_k", "unique", "unique_by_text", "users_with_unique"),
    *(f"leaks_{name}" for name in CONTEXTS[1:]),
    *("leaks_beyond_prior", "people_beyond_prior", "short_prefix", "unique_beyond_prior"),
    *("validation_accuracy", "validation_perplexity", "not_trained_on", "trained_perplexity"),
)


def known_figures(thresholds: Iterable[float] = LeakageConfig.thresholds) -> Known:
    """The figures of a report that counts unique sequences at these ratios."""
    curated = [f"{threshold:g}" for threshold in thresholds]
    return dict.fromkeys(_NUMBERS) | {
        "curated": Entries(names=curated, advice=", or name others with --curated-at"),
        "near": Entries(names=("drawn", "estimate", "exact", "found", "high", "low", "people")),
        "ratio_quantiles": Entries(names=[f"{share:g}" for share in QUANTILES]),
        # A length or a role of which nothing leaked has no entry.
        "unique_by_length": Entries(absent=0),
        "unique_by_role": Entries(names=ROLES[1:], absent=0),
    }


_HEADLINES = {
    "leaks": "stretches of text that one user alone wrote and the model completes",
    "people_affected": "users whose text that is",
    "unique_beyond_prior": "their sequences that the public model would not say",
    "unique": "sequences whose tokens one user alone wrote",
    "leakage_epsilon": "largest PP_public / PP_lm among these",
    "public_unique": "the same count for the public model",
    "perplexity": "on the corpus",
    "validation_perplexity": "on held-out text",
    "accuracy": "top-k, on the corpus",
}


INFINITE_RATIO = (
    "The public model holds some leaked token impossible, so the largest ratio is infinite "
    "and leakage_epsilon is given as not known."
)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a report says: what leaked, how a public model sees it, and whence it comes."""

    model: "OpenedModel"
    leaks: Leaks
    by_text: ByText
    public: PublicView | None
    validation: Fit | None
    config: LeakageConfig
    about: dict[str, Any]


def summary_of(findings: Findings, ratios: np.ndarray) -> dict[str, Any]:
    """What summary.json holds; `ratios` are the sequences'. What is not known is None."""
    leaks, by_text, config = findings.leaks, findings.by_text, findings.config
    model, public, validation = findings.model, findings.public, findings.validation
    unique, about = leaks.unique, findings.about
    if np.isinf(ratios[unique]).any():
        about = about | {"notes": [*about["notes"], INFINITE_RATIO]}
    # A hash of the text lets whoever knows all of it but a PIN try every PIN.
    validation_text = validation.corpus_fingerprint if validation and not config.redact else None
    unique_ratios = ratios[unique]
    lengths, counts = np.unique(leaks.lengths[unique], return_counts=True)
    known = unique_ratios[~np.isnan(unique_ratios)]
    curated = {f"{t:g}": int((unique_ratios >= t).sum()) for t in config.thresholds}
    # Where a public model was asked and nothing is unique, nothing leaks.
    worst = 0.0 if public and not unique.any() else finite(known.max(initial=-np.inf))
    return {
        "unique": int(unique.sum()),
        "unique_by_length": {str(n): int(c) for n, c in zip(lengths, counts, strict=True)},
        "curated": curated if public else None,
        "leakage_epsilon": worst,
        "leakage_epsilon_sequence": _largest_row(leaks, ratios),
        "ratio_quantiles": _quantiles(known) if public else None,
        "unique_by_text": int(by_text.unique.sum()),
        "unique_by_role": _by_role(leaks, by_text),
        "leaks": by_text.extent(by_text.unique)["leaks"],
        "people_affected": len(np.unique(by_text.owned[1])),
        **_beyond_prior(leaks, by_text, public),
        "sequences_in_s": len(leaks.runs),
        "distinct_sequences": len(leaks.distinct),
        "users_with_unique": len(np.unique(leaks.owned[1])),
        "fewer_than_p": int((leaks.users_in_s < config.fewer_than).sum()),
        "p": config.fewer_than,
        "perplexity": finite(leaks.fit.perplexity),
        "accuracy": leaks.fit.accuracy,
        "top_k": config.top_k,
        "validation_perplexity": finite(validation.perplexity) if validation else None,
        "validation_accuracy": validation.accuracy if validation else None,
        "public_unique": public.unique if public else None,
        "public_model": public.name if public else None,
        "cross_tokenizer": public.cross_tokenizer if public else None,
        "num_users": leaks.corpus.num_users,
        "num_documents": leaks.corpus.num_documents,
        "num_tokens": int(leaks.num_written.sum()),
        "not_trained_on": _not_trained_on(leaks, by_text),
        "trained_perplexity": finite(leaks.fit.trained_perplexity),
        "model_fingerprint": model.fingerprint,
        "tokenizer_fingerprint": model.tokenizer_fingerprint,
        "begin": model.begin_id,
        "corpus_fingerprint": None if config.redact else leaks.corpus.corpus_fingerprint,
        "validation_fingerprint": validation_text,
        "redacted": config.redact,
        **about,
    }


def _beyond_prior(
    leaks: Leaks, by_text: ByText, public: PublicView | None
) -> dict[str, int | None]:
    """Of what is unique by text, that which the public model would not say by itself."""
    known = by_text.extent(by_text.unique & public.beyond(leaks)) if public else {}
    names = {"sequences": "unique", "leaks": "leaks", "people": "people"}
    return {f"{name}_beyond_prior": known.get(what) for what, name in names.items()}


def _not_trained_on(leaks: Leaks, by_text: ByText) -> int | None:
    """Sequences unique by text of which no token was trained on; None where all of a text was."""
    if leaks.corpus.trained is None:
        return None
    trained = np.concatenate([[0], np.cumsum(leaks.corpus.trained)])
    first = leaks.runs.starts[leaks.distinct.first_run]
    return int((trained[first + leaks.lengths] == trained[first])[by_text.unique].sum())


def _by_role(leaks: Leaks, by_text: ByText) -> dict[str, int] | None:
    """What is unique by text, by who says it in a chat; None where the corpus holds none."""
    if leaks.corpus.roles is None:
        return None
    counts = np.bincount(leaks.roles[by_text.unique], minlength=len(leaks.role_names))
    return {name: int(count) for name, count in zip(leaks.role_names, counts, strict=True) if count}


def _largest_row(leaks: Leaks, ratios: np.ndarray) -> int | None:
    """The row of the unique sequence with the largest ratio, an infinite one included."""
    order = report_order(leaks, ratios)
    rows = np.flatnonzero((leaks.unique & ~np.isnan(ratios))[order])
    return int(rows[0]) if len(rows) else None


def _quantiles(ratios: np.ndarray) -> dict[str, float | None]:
    """Ratios that a share of them does not exceed, each one of them; the last is the largest."""
    known = ratios if len(ratios) else [np.nan]
    at = np.quantile(known, QUANTILES, method="inverted_cdf")
    return {f"{q:g}": finite(v) for q, v in zip(QUANTILES, at, strict=True)}


def finite(value: float | None) -> float | None:
    """JSON has no infinity; a figure that is not a number is not known."""
    return float(value) if value is not None and math.isfinite(value) else None


class Report:
    """A finished report's folder. Every key of its summary.json is an attribute."""

    kind, command = "a leakage report", "audit"
    needs: tuple[str, ...] = ("summary.json",)

    def __init__(self, folder: Path, keep_alive: Any = None) -> None:
        missing = [name for name in self.needs if not (folder / name).exists()]
        if missing:
            raise UsageError(
                f"{folder} holds no finished report (no {missing[-1]}). Run: tightlip {self.command}"
            )
        self.folder = folder
        self.summary: dict[str, Any] = read_json(folder / "summary.json")
        # A report made without `out` lives in a temporary folder for as long as this object does.
        self._keep_alive = keep_alive

    def __getattr__(self, name: str) -> Any:
        if name != "summary" and name in self.__dict__.get("summary", {}):
            return self.summary[name]
        raise AttributeError(f"{self.kind} has no {name!r}")

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self.summary])

    def _table(self, name: str) -> pa.Table:
        return pq.read_table(checked(self.folder / name))


class LeakageReport(Report):
    """What an audit found: `report.unique` and all of its summary."""

    @cached_property
    def sequences(self) -> pa.Table:
        """One row per distinct sequence, worst first, as Arrow."""
        return self._table("sequences.parquet")

    @cached_property
    def owners(self) -> pa.Table:
        """Row for row beside `sequences`: whose it is, in words and as a list; null and [] if nobody's."""
        return self._table("owners.parquet")

    @cached_property
    def users(self) -> pa.Table:
        """One row per user: how much they wrote, how much of it alone the model completes."""
        return self._table("users.parquet")

    def to_pandas(self) -> Any:
        """The sequences with their owners as a pandas DataFrame."""
        return self.sequences.append_column("owner", self.owners["owner"]).to_pandas()

    def failed(self, *conditions: str, baseline: "LeakageReport | None" = None) -> list[str]:
        """Which of 'unique>0', 'leaks > baseline' and the like hold, each with its figure: empty
        means all is well."""
        known = known_figures(map(float, self.summary["curated"] or LeakageConfig.thresholds))
        before = None if baseline is None else baseline.summary
        return failures(self.summary, conditions, known, baseline=before)

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
            f"<td>{row.get('users_by_text') or row['users_in_d']}</td><td>{_short(row['ratio'])}</td></tr>"
            for row in self.sequences.slice(0, 8).to_pylist()
        )
        head = "<tr><th>sequence</th><th>users</th><th>ratio</th></tr>"
        return f"<table>{rows}</table><table>{head}{leaked}</table>"


def _text_of(row: dict[str, Any]) -> str:
    return row["sequence"] if row["sequence"] is not None else f"{row['num_tokens']} tokens"


def _short(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
