"""The report's tables: one row per leaked sequence, one per user. Formats: docs/formats.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.audit.leakage.by_text import ByText
from tightlip.audit.leakage.counting import edges_of
from tightlip.audit.leakage.leaks import Leaks, PublicView
from tightlip.audit.leakage.runs import grouped
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


def ratio_of_sequence(leaks: Leaks, public: PublicView | None) -> np.ndarray:
    """The largest ratio over all occurrences of each sequence; NaN where none is known."""
    if public is None:
        return leaks.room.full(len(leaks.distinct), np.nan, np.float64)
    theirs, own = public.perplexity_of_run, leaks.perplexity_of_run
    with np.errstate(divide="ignore", invalid="ignore"):
        return leaks.over_runs(np.fmax, np.nan, lambda part: theirs[part] / own[part])


def report_order(leaks: Leaks, ratios: np.ndarray) -> np.ndarray:
    """Largest ratio first, unknown last; then longest; then by token ids (their numbers' order)."""
    # NaN goes last by itself. Two sorts by one key hold less than one by both.
    by_length = np.argsort(-leaks.lengths, kind="stable")
    by_ratio = np.argsort(-ratios[by_length], kind="stable")
    return leaks.room.made(len(ratios), np.int64, lambda part: by_length[by_ratio[part]])


def leak_rows(leaks: Leaks, by_text: ByText, order: np.ndarray) -> np.ndarray:
    """For each sequence the row of its leak's longest sequence, of equals the first; -1 for no leak."""
    room, size, leak = leaks.room, len(order), by_text.leaks
    best = room.full(size, 0, np.int64)  # of each leak: a length, and how many rows come behind
    for part in room.parts(size):
        is_in = leak[order[part]] >= 0
        chosen, rows = order[part][is_in], np.arange(part.start, part.stop)[is_in]
        np.maximum.at(best, leak[chosen], leaks.lengths[chosen] * size + size - 1 - rows)
    row = room.kept(size - 1 - best % max(size, 1))
    return room.made(size, np.int64, lambda part: np.where(leak[part] < 0, -1, row[leak[part]]))


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
    occurrences, edges = grouped(leaks.distinct.number_of_run, len(order), leaks.room)
    copied = leaks.of_every_run(leaks.copied_of_run)
    names, most = user_names(leaks.corpus, config.redact), config.occurrences
    prior, beyond = (public.prior(leaks), public.beyond(leaks)) if public else (None, None)
    with (
        written_whole(folder / "sequences.parquet") as sequences_path,
        written_whole(folder / "owners.parquet") as owners_path,
        pq.ParquetWriter(sequences_path, SEQUENCES, compression="zstd") as sequences,
        pq.ParquetWriter(owners_path, OWNERS, compression="zstd") as owners,
        task("Writing the report", len(order)) as bar,
    ):
        for begin in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[begin : begin + _ROWS_AT_ONCE]
            several = [occurrences[edges[row] : edges[row + 1]] for row in rows]
            kept, sizes = _lowest(leaks, several, most)
            columns = _columns(leaks, rows, kept, sizes) | {
                "ratio": _null_nan(ratios[rows]),
                "copied": copied[rows],
                "users_by_text": _null_below(by_text.users[rows], 1),
                "unique_by_text": by_text.unique[rows],
                "leak": _null_below(leak[rows], 0),
            }
            if public is not None and prior is not None and beyond is not None:
                perplexities = _null_nan(public.perplexity_of_run[kept])
                columns["public_perplexities"] = _lists(perplexities, sizes, pa.float64())
                columns |= {"prior": _null_nan(prior[rows]), "beyond_prior": beyond[rows]}
            if not config.redact:
                columns |= _texts(leaks, rows, kept, sizes, decode)
            nothing = {field.name: pa.nulls(len(rows), field.type) for field in SEQUENCES}
            sequences.write_table(pa.table(nothing | columns, schema=SEQUENCES))
            ends = [np.searchsorted(leaks.owned[0], rows, side) for side in ("left", "right")]
            whose = [leaks.owned[1, start:end] for start, end in zip(*ends, strict=True)]
            each = [[names[user] for user in users] for users in whose]
            owner = [", ".join(one) or None for one in each]
            owners.write_table(pa.table({"owner": owner, "owners": each}, schema=OWNERS))
            bar.advance(len(rows))


def user_names(corpus: TokenizedCorpus, redact: bool) -> list[str]:
    """What the report calls each user: redacted, a number in order of appearance."""
    names = corpus.user_names
    return [f"user {number + 1}" for number in range(len(names))] if redact else names


def _lowest(
    leaks: Leaks, several: list[np.ndarray], most: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Of the runs of each sequence those kept, lowest perplexity first, then in corpus order; and how
    many they are."""
    if leaks.room.folder is not None and most is not None:
        several = [_lowest_of(leaks, runs, most) if len(runs) > most else runs for runs in several]
    sizes = np.array([len(runs) for runs in several])
    runs, row = np.concatenate(several), np.repeat(np.arange(len(several)), sizes)
    runs = runs[np.lexsort((leaks.perplexity_of_run[runs], row))]
    place = np.arange(len(runs)) - edges_of(sizes)[row]
    return runs[place < (most or len(runs))], np.minimum(sizes, most or len(runs))


def _lowest_of(leaks: Leaks, runs: np.ndarray, most: int) -> np.ndarray:
    kept = runs[:0]
    for part in leaks.room.parts(len(runs)):
        kept = np.append(kept, runs[part])
        kept = kept[np.argsort(leaks.perplexity_of_run[kept], kind="stable")[:most]]
    return kept


def _columns(leaks: Leaks, rows: np.ndarray, flat: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    before = leaks.runs.starts[flat] - leaks.corpus.bounds[leaks.runs.documents[flat]]
    columns = {
        "num_tokens": leaks.lengths[rows].astype(np.int32),
        "total_in_s": leaks.total_in_s[rows],
        "users_in_s": leaks.users_in_s[rows],
        "total_in_d": leaks.total_in_d[rows],
        "users_in_d": leaks.users_in_d[rows],
        "context_tokens": _lists(before.astype(np.int32), sizes, pa.int32()),
        "perplexities": _lists(leaks.perplexity_of_run[flat], sizes, pa.float64()),
    }
    return columns if leaks.corpus.role_names is None else columns | _of_chats(leaks, rows)


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


def _texts(
    leaks: Leaks,
    rows: np.ndarray,
    kept: np.ndarray,
    sizes: np.ndarray,
    decode: Callable[[list[list[int]]], list[str]],
) -> dict[str, Any]:
    tokens, runs = leaks.corpus.tokens, leaks.runs
    ids = [
        tokens[runs.starts[run] : runs.starts[run] + runs.lengths[run]].tolist()
        for run in leaks.distinct.first_run[rows]
    ]
    contexts = []
    for run in kept.tolist():
        document = leaks.corpus.bounds[runs.documents[run]]
        begin = max(document, runs.starts[run] - CONTEXT_TOKENS)
        contexts.append(tokens[begin : runs.starts[run]].tolist())
    return {
        "sequence": decode(ids),
        "token_ids": pa.array(ids, pa.list_(pa.int32())),
        "contexts": _lists(pa.array(decode(contexts), pa.string()), sizes, pa.string()),
    }


def _lists(values: Any, sizes: np.ndarray, value_type: pa.DataType) -> pa.Array:
    offsets = edges_of(sizes).astype(np.int32)
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
    corpus, (unique, owners) = leaks.corpus, leaks.owned
    pairs = np.unique(by_text.leaks[sequences] * corpus.num_users + by_words)
    of_leaks = pairs % max(corpus.num_users, 1)
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
