"""What an extraction report holds: a table of windows, one of users, and the figures of its summary."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tightlip.audit.extraction import windows
from tightlip.audit.extraction.windows import (
    EVEN,
    NEARLY,
    Likeliest,
    Searched,
    num_roles,
    queries_for,
)
from tightlip.audit.leakage.summary import Report, finite
from tightlip.audit.leakage.tables import CONTEXT_TOKENS, user_names, write_table
from tightlip.core.gates import Entries, Known, failures
from tightlip.corpus.rendered import ROLES
from tightlip.corpus.tokens import TokenizedCorpus

FILES = SUMMARY, WINDOWS, USERS = "summary.json", "windows.parquet", "users.parquet"
Figures = dict[str, Any]
WINDOW_COLUMNS = pa.schema(
    [
        ("user", pa.string()),
        ("num_tokens", pa.int32()),
        ("role", pa.string()),
        ("document", pa.int64()),
        ("prefix_tokens", pa.int32()),
        ("log_prob", pa.float64()),
        ("queries_50", pa.float64()),
        ("queries_90", pa.float64()),
        ("reference_log_prob", pa.float64()),
        ("reference_queries_50", pa.float64()),
        ("counted", pa.bool_()),
        ("window", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("prefix", pa.string()),
    ]
)


def known_figures(lengths: Iterable[int]) -> Known:
    """What a gate may ask of a report on windows of these lengths."""
    names = [str(length) for length in lengths]
    return {
        **dict.fromkeys(("cheapest_queries", "cheapest_queries_90", "held_out_cheapest_queries")),
        **dict.fromkeys(("num_users", "num_documents", "num_tokens")),
        "cheapest_queries_by_length": Entries(
            names=names, advice=", or name others with --lengths"
        ),
        "cheapest_queries_by_role": Entries(names=ROLES[1:]),
        "users_within": Entries(names=[str(most) for most in windows.WITHIN]),
    }


def gated(summary: Figures) -> Figures:
    """The figures of a summary as gates name them: infinite where nothing searched can come out,
    not known where nothing was searched, or something comes out and none of it counts."""
    lengths, held_out = summary["by_length"], summary["held_out"]
    first = next(iter(lengths.values()))
    roles = {role: next(iter(of.values())) for role, of in (summary["by_role"] or {}).items()}
    return {
        **{name: summary[name] for name in ("num_users", "num_documents", "num_tokens")},
        "cheapest_queries": _fewest(lengths),
        "cheapest_queries_90": _fewest(lengths, "queries_90"),
        "held_out_cheapest_queries": held_out and _fewest(held_out["by_length"]),
        "cheapest_queries_by_length": {name: _tries(one) for name, one in lengths.items()},
        "cheapest_queries_by_role": {role: _tries(one) for role, one in roles.items()},
        "users_within": None if _tries(first) is None else first["users_within"],
    }


def _fewest(lengths: dict[str, Figures], name: str = "queries_50") -> float | None:
    """Over all lengths: the shortest windows are the cheapest, where there are any."""
    known = (n for one in lengths.values() if (n := _tries(one, name)) is not None)
    fewest = min(known, default=None)
    # Never at one length says nothing of another, where something comes out that does not count.
    is_silent = fewest == math.inf and any(_is_uncounted(one) for one in lengths.values())
    return None if is_silent else fewest


def _tries(one: Figures, name: str = "queries_50") -> float | None:
    if not one["searched"] or _is_uncounted(one):
        return None
    known = (one["cheapest"] or {}).get(name)
    return known if known is not None else math.inf


def _is_uncounted(one: Figures) -> bool:
    """Whether windows come out, and none of them counts, as the reference draws them too."""
    return one["cheapest"] is None and one["cheapest_of_all"] is not None


def figures_by_length(
    found: Sequence[Searched], corpus: TokenizedCorpus, role: int | None = None
) -> dict[str, Figures]:
    return {str(one.length): _figures(one, num_roles(corpus), role) for one in found}


def figures_by_role(
    found: Sequence[Searched], corpus: TokenizedCorpus
) -> dict[str, dict[str, Figures]] | None:
    """The same for each role that says something of its own; None where the corpus holds no chats."""
    if corpus.role_names is None:
        return None
    every = {name: figures_by_length(found, corpus, n) for n, name in enumerate(corpus.role_names)}
    return {name: of for name, of in every.items() if any(one["searched"] for one in of.values())}


def _figures(one: Searched, roles: int, role: int | None) -> Figures:
    def of(array: np.ndarray) -> np.ndarray:
        """A row for each user, with those of the role or of all."""
        return array.reshape(-1, roles)[:, slice(role, None if role is None else role + 1)]

    likeliest = of(one.likeliest.log_probs).max(axis=1, initial=-np.inf)
    tries = queries_for(EVEN, likeliest)
    figures = {
        "searched": int(of(one.searched).sum()),
        "users": int((of(one.searched).sum(axis=1) > 0).sum()),
        "counted": int(of(one.counted).sum()),
        "cheapest": _cheapest(one.likeliest, of),
        "cheapest_of_all": _cheapest(one.every, of),
        "users_within": {str(most): int((tries <= most).sum()) for most in windows.WITHIN},
    }
    if role is None:
        within = zip(windows.WITHIN, one.windows_within.tolist(), strict=True)
        without = int((~of(one.has_window).any(axis=1)).sum())
        figures |= {"windows": one.num_windows, "users_without_window": without}
        figures |= {"windows_within": {str(most): count for most, count in within}}
    return figures


def _cheapest(among: Likeliest, of: Callable[[np.ndarray], np.ndarray]) -> Figures | None:
    log_probs, references = of(among.log_probs).ravel(), of(among.references).ravel()
    if not np.isfinite(log_probs).any():
        return None
    best = int(log_probs.argmax())
    return {
        "log_prob": float(log_probs[best]),
        **_queries(log_probs[best]),
        "reference_log_prob": finite(references[best]),
        "reference_queries_50": _queries(references[best])["queries_50"],
    }


def _queries(log_prob: float) -> dict[str, float | None]:
    """Tries that can be counted, else None."""
    tries = {f"queries_{100 * share:.0f}": queries_for(share, log_prob) for share in (EVEN, NEARLY)}
    return {name: finite(float(one)) for name, one in tries.items()}


def write_tables(
    folder: Path,
    found: Sequence[Searched],
    corpus: TokenizedCorpus,
    decode: Callable[[list[list[int]]], list[str]],
    *,
    redact: bool,
) -> None:
    """Write windows.parquet, the cheapest first within a length, and users.parquet."""
    names = user_names(corpus, redact)
    rows = [row for one in found for row in _rows(one, corpus, names)]
    prefixes = [row.pop("prefix_ids") for row in rows]
    if redact:
        rows = [row | {"token_ids": None} for row in rows]
    else:
        before = decode(prefixes)
        both = decode([ids + row["token_ids"] for ids, row in zip(prefixes, rows, strict=True)])
        alone = decode([row["token_ids"] for row in rows])
        for row, prefix, whole, window in zip(rows, before, both, alone, strict=True):
            # Decoded behind its prefix a window keeps the space before it.
            row["prefix"] = prefix
            row["window"] = whole[len(prefix) :] if whole.startswith(prefix) else window
    write_table(folder / WINDOWS, pa.Table.from_pylist(rows, schema=WINDOW_COLUMNS))
    write_table(folder / USERS, _users(found, corpus, names))


def _rows(one: Searched, corpus: TokenizedCorpus, names: list[str]) -> Iterator[dict[str, Any]]:
    """The cheapest window of each user and role, and the cheapest that counts where it is another."""
    counted, every, roles = one.likeliest, one.every, num_roles(corpus)
    keys = [(key, counted, True) for key in np.flatnonzero(counted.starts != windows.NOWHERE)]
    differs = (every.starts != windows.NOWHERE) & (every.starts != counted.starts)
    keys += [(key, every, False) for key in np.flatnonzero(differs)]
    keys = [one for one in keys if np.isfinite(one[1].log_probs[one[0]])]
    for key, among, is_counted in sorted(keys, key=lambda k: (-k[1].log_probs[k[0]], k[0])):
        start, user, role = int(among.starts[key]), key // roles, key % roles
        document = int(np.searchsorted(corpus.bounds, start, side="right")) - 1
        begin, reference = int(corpus.bounds[document]), among.references[key]
        yield {
            "user": names[user],
            "num_tokens": one.length,
            "role": corpus.role_names[role] if corpus.role_names else None,
            "document": document,
            "prefix_tokens": start - begin,
            "log_prob": float(among.log_probs[key]),
            **_queries(among.log_probs[key]),
            "reference_log_prob": None if np.isnan(reference) else float(reference),
            "reference_queries_50": _queries(reference)["queries_50"],
            "counted": is_counted,
            "token_ids": corpus.tokens[start : start + one.length].tolist(),
            "prefix_ids": corpus.tokens[max(begin, start - CONTEXT_TOKENS) : start].tolist(),
        }


def _users(found: Sequence[Searched], corpus: TokenizedCorpus, names: list[str]) -> pa.Table:
    """A row for each user and length; null where nothing of theirs that counts can come out."""
    roles, parts = num_roles(corpus), []
    for one in found:
        best = one.likeliest.log_probs.reshape(-1, roles).max(axis=1, initial=-np.inf)
        is_known = np.isfinite(best)
        columns = {
            "user": pa.array(names, pa.string()),
            "num_tokens": pa.array(np.full(len(names), one.length), pa.int32()),
            "searched": pa.array(one.searched.reshape(-1, roles).sum(axis=1)),
            "counted": pa.array(one.counted.reshape(-1, roles).sum(axis=1)),
            "log_prob": pa.array(best, pa.float64(), mask=~is_known),
        }
        for share in (EVEN, NEARLY):
            tries = queries_for(share, best)
            columns[f"queries_{100 * share:.0f}"] = pa.array(tries, mask=~np.isfinite(tries))
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)


class ExtractionReport(Report):
    """What it takes to draw text out of a model: `report.cheapest_queries` and all of its summary."""

    kind, command = "an extraction report", "extract"
    needs = (WINDOWS, SUMMARY)

    @cached_property
    def windows(self) -> pa.Table:
        """The cheapest windows of each user and length, as Arrow."""
        return self._table(WINDOWS)

    @cached_property
    def users(self) -> pa.Table:
        """One row per user and length: how many windows were searched, and the cheapest."""
        return self._table(USERS)

    def failed(self, *conditions: str) -> list[str]:
        """Which of 'cheapest_queries<1000' and the like hold, each with its figure."""
        return failures(gated(self.summary), conditions, known_figures(self.summary["lengths"]))

    def __repr__(self) -> str:
        return f"ExtractionReport(cheapest_queries={_fewest(self.by_length)}, folder={str(self.folder)!r})"
