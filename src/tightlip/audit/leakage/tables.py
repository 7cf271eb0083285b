"""The report's tables: one row per leaked sequence, one per user. Formats: docs/formats.md."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.audit.leakage.by_text import ByText
from tightlip.audit.leakage.counting import edges_of
from tightlip.audit.leakage.leaks import Leaks, PublicView
from tightlip.audit.settings import LeakageConfig
from tightlip.core.files import written_whole
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus

CONTEXT_TOKENS = 32
_ROWS_AT_ONCE = 10_000

SEQUENCES = pa.schema(
    [
        ("sequence", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("num_tokens", pa.int32()),
        ("total_in_s", pa.int64()),
        ("users_in_s", pa.int64()),
        ("total_in_d", pa.int64()),
        ("users_in_d", pa.int64()),
        ("contexts", pa.list_(pa.string())),
        ("context_tokens", pa.list_(pa.int32())),
        ("perplexities", pa.list_(pa.float64())),
        ("public_perplexities", pa.list_(pa.float64())),
        ("ratio", pa.float64()),
        ("copied", pa.bool_()),
        ("users_by_text", pa.int32()),
        ("unique_by_text", pa.bool_()),
        ("leak", pa.int32()),
        ("role", pa.string()),
        ("trained_on", pa.bool_()),
        ("prior", pa.float64()),
        ("beyond_prior", pa.bool_()),
    ]
)
OWNERS = pa.schema([("owner", pa.string()), ("owners", pa.list_(pa.string()))])


def ratio_of_sequence(leaks: Leaks, ratio_of_run: np.ndarray | None) -> np.ndarray:
    """The largest ratio over all occurrences of each sequence; NaN where none is known."""
    ratios = np.full(len(leaks.distinct), np.nan)
    if ratio_of_run is not None:
        known = ~np.isnan(ratio_of_run)
        np.fmax.at(ratios, leaks.distinct.number_of_run[known], ratio_of_run[known])
    return ratios


def report_order(leaks: Leaks, ratios: np.ndarray) -> np.ndarray:
    """Largest ratio first, unknown last; then longest; then by token ids (their numbers' order)."""
    ascending = np.where(np.isnan(ratios), np.inf, -ratios)
    # An infinite ratio is the worst there is; only NaN goes last.
    unknown = np.isnan(ratios)
    return np.lexsort((np.arange(len(ratios)), -leaks.lengths, ascending, unknown))


def leak_rows(leaks: Leaks, by_text: ByText, order: np.ndarray) -> np.ndarray:
    """For each sequence the row of its leak's longest sequence, of equals the first; -1 for no leak."""
    row = np.argsort(order)
    members = np.flatnonzero(by_text.leaks >= 0)
    leak = by_text.leaks[members]
    best = members[np.lexsort((row[members], -leaks.lengths[members], leak))]
    numbers, first = np.unique(by_text.leaks[best], return_index=True)
    rows = np.full(len(order), -1)
    rows[members] = row[best[first]][np.searchsorted(numbers, leak)]
    return rows


def write_sequences(
    folder: Path,
    leaks: Leaks,
    by_text: ByText,
    ratios: np.ndarray,
    public: PublicView | None,
    decode: Callable[[list[list[int]]], list[str]],
    config: LeakageConfig,
) -> None:
    """Write sequences.parquet and, row for row beside it, owners.parquet."""
    order = report_order(leaks, ratios)
    leak = leak_rows(leaks, by_text, order)
    occurrence_order, edges = _occurrences(leaks)
    names, most = user_names(leaks.corpus, config.redact), config.occurrences
    prior, beyond = (public.prior(leaks), public.beyond(leaks)) if public else (None, None)
    whose: dict[int, list[int]] = defaultdict(list)
    for sequence, user in leaks.owned.T.tolist():
        whose[sequence].append(user)
    with (
        written_whole(folder / "sequences.parquet") as sequences_path,
        written_whole(folder / "owners.parquet") as owners_path,
        pq.ParquetWriter(sequences_path, SEQUENCES, compression="zstd") as sequences,
        pq.ParquetWriter(owners_path, OWNERS, compression="zstd") as owners,
        task("Writing the report", len(order)) as bar,
    ):
        for begin in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[begin : begin + _ROWS_AT_ONCE]
            kept = [occurrence_order[edges[row] : edges[row + 1]][:most] for row in rows]
            columns = _columns(leaks, rows, kept, public, ratios)
            columns |= {
                "users_by_text": _null_below(by_text.users[rows], 1),
                "unique_by_text": by_text.unique[rows],
                "leak": _null_below(leak[rows], 0),
            }
            if prior is not None and beyond is not None:
                columns |= {"prior": _null_nan(prior[rows]), "beyond_prior": beyond[rows]}
            if not config.redact:
                columns |= _texts(leaks, rows, kept, decode)
            nothing = {field.name: pa.nulls(len(rows), field.type) for field in SEQUENCES}
            sequences.write_table(pa.table(nothing | columns, schema=SEQUENCES))
            each = [[names[user] for user in whose[row]] for row in rows.tolist()]
            owner = [", ".join(one) or None for one in each]
            owners.write_table(pa.table({"owner": owner, "owners": each}, schema=OWNERS))
            bar.advance(len(rows))


def user_names(corpus: TokenizedCorpus, redact: bool) -> list[str]:
    """What the report calls each user: redacted, a number in order of appearance."""
    names = corpus.user_names
    return [f"user {number + 1}" for number in range(len(names))] if redact else names


def _occurrences(leaks: Leaks) -> tuple[np.ndarray, np.ndarray]:
    """Runs grouped by sequence, lowest perplexity first, then in corpus order; and the edges."""
    number = leaks.distinct.number_of_run
    order = np.lexsort((np.arange(len(number)), leaks.perplexity_of_run, number))
    return order, edges_of(leaks.total_in_s)


def _columns(
    leaks: Leaks,
    rows: np.ndarray,
    kept: list[np.ndarray],
    public: PublicView | None,
    ratios: np.ndarray,
) -> dict[str, Any]:
    flat = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    sizes = [len(runs) for runs in kept]
    before = leaks.runs.starts[flat] - leaks.corpus.bounds[leaks.runs.documents[flat]]
    columns = {
        "num_tokens": leaks.lengths[rows].astype(np.int32),
        "total_in_s": leaks.total_in_s[rows],
        "users_in_s": leaks.users_in_s[rows],
        "total_in_d": leaks.total_in_d[rows],
        "users_in_d": leaks.users_in_d[rows],
        "context_tokens": _lists(before.astype(np.int32), sizes, pa.int32()),
        "perplexities": _lists(leaks.perplexity_of_run[flat], sizes, pa.float64()),
        "ratio": _null_nan(ratios[rows]),
        "copied": copied_sequences(leaks)[rows],
    }
    if leaks.corpus.role_names is not None:
        columns |= _of_chats(leaks, rows)
    if public is not None:
        perplexities = _null_nan(public.perplexity_of_run[flat])
        columns["public_perplexities"] = _lists(perplexities, sizes, pa.float64())
    return columns


def _of_chats(leaks: Leaks, rows: np.ndarray) -> dict[str, Any]:
    """Whose words a sequence is, where the model first completes it, and whether it was trained on."""
    corpus, first = leaks.corpus, leaks.distinct.first_run[rows]
    assert corpus.trained is not None
    starts, ends = leaks.runs.starts[first], leaks.runs.starts[first] + leaks.runs.lengths[first]
    num_trained = edges_of(corpus.trained)
    return {
        "role": [leaks.role_names[number] for number in leaks.roles[rows]],
        "trained_on": num_trained[ends] > num_trained[starts],
    }


def copied_sequences(leaks: Leaks) -> np.ndarray:
    """Sequences whose every occurrence in S stood in its own context already.

    One occurrence that did not is a leak the copying mechanism does not explain.
    """
    own = np.bincount(
        leaks.distinct.number_of_run, weights=~leaks.copied_of_run, minlength=len(leaks.distinct)
    )
    return own == 0


def _texts(
    leaks: Leaks,
    rows: np.ndarray,
    kept: list[np.ndarray],
    decode: Callable[[list[list[int]]], list[str]],
) -> dict[str, Any]:
    tokens, runs = leaks.corpus.tokens, leaks.runs
    ids = [
        tokens[runs.starts[run] : runs.starts[run] + runs.lengths[run]].tolist()
        for run in leaks.distinct.first_run[rows]
    ]
    contexts = []
    for run in (int(run) for chosen in kept for run in chosen):
        document = leaks.corpus.bounds[runs.documents[run]]
        begin = max(document, runs.starts[run] - CONTEXT_TOKENS)
        contexts.append(tokens[begin : runs.starts[run]].tolist())
    return {
        "sequence": decode(ids),
        "token_ids": pa.array(ids, pa.list_(pa.int32())),
        "contexts": _lists(
            pa.array(decode(contexts), pa.string()), [len(c) for c in kept], pa.string()
        ),
    }


def _lists(values: Any, sizes: list[int], value_type: pa.DataType) -> pa.Array:
    offsets = edges_of(np.array(sizes, np.int64)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, value_type))


def _null_below(values: np.ndarray, least: int) -> pa.Array:
    return pa.array(values.astype(np.int32), pa.int32(), mask=values < least)


def _null_nan(values: np.ndarray) -> pa.Array:
    return pa.array(values, pa.float64(), mask=np.isnan(values))


def write_users(
    folder: Path, leaks: Leaks, by_text: ByText, ratios: np.ndarray, redact: bool
) -> None:
    """One row per user: how much they wrote and how much of it alone the model completes."""
    sequences, by_words = by_text.owned
    # Of a leak's sequences all belong to its owner, or some where texts have several.
    of_leaks = np.unique(np.stack([by_text.leaks[sequences], by_words]), axis=1)[1]
    corpus, (unique, owners) = leaks.corpus, leaks.owned
    documents, owners_of_documents = corpus.owned()
    lengths = leaks.lengths[unique]
    num_users = corpus.num_users
    longest = np.zeros(num_users, dtype=np.int32)
    np.maximum.at(longest, owners, lengths)
    max_ratio = np.full(num_users, np.nan)
    np.fmax.at(max_ratio, owners, ratios[unique])

    def by_user(users: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(users, weights, num_users).astype(np.int64)

    table = pa.table(
        {
            "user": user_names(leaks.corpus, redact),
            "num_documents": by_user(owners_of_documents),
            "num_tokens": by_user(owners_of_documents, leaks.num_written[documents]),
            "unique": by_user(owners),
            "unique_tokens": by_user(owners, lengths),
            "longest": longest,
            "max_ratio": _null_nan(max_ratio),
            "unique_by_text": by_user(by_words),
            "leaks": by_user(of_leaks),
        }
    )
    write_table(folder / "users.parquet", table)


def write_table(path: Path, table: pa.Table) -> None:
    with written_whole(path) as beside:
        pq.write_table(table, beside, compression="zstd")
