"""Report folders made up on the spot, from lines everybody may quote."""

import json
import math
import random
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

LINES = """
Shall I compare thee to a summer's day? Thou art more lovely and more temperate
Rough winds do shake the darling buds of May, and summer's lease hath all too short a date
When in disgrace with fortune and men's eyes I all alone beweep my outcast state
Let me not to the marriage of true minds admit impediments; love is not love
My mistress' eyes are nothing like the sun; coral is far more red than her lips' red
That time of year thou mayst in me behold when yellow leaves, or none, or few, do hang
If music be the food of love, play on; give me excess of it
To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer
Tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day
Our revels now are ended. These our actors, as I foretold you, were all spirits
The quality of mercy is not strained; it droppeth as the gentle rain from heaven
Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him
Now is the winter of our discontent made glorious summer by this sun of York
Once more unto the breach, dear friends, once more; or close the wall up with our English dead
""".strip().splitlines()
PEOPLE = [
    "Viola",
    "Orsino",
    "Olivia",
    "Feste",
    "Malvolio",
    "Hamlet",
    "Ophelia",
    "Laertes",
    "Portia",
    "Brutus",
    "Prospero",
    "Ariel",
    "Miranda",
    "Banquo",
]

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
    ]
)
BY_TEXT = pa.schema(
    [
        *SEQUENCES,
        ("users_by_text", pa.int32()),
        ("unique_by_text", pa.bool_()),
        ("leak", pa.int32()),
        ("role", pa.string()),
        ("trained_on", pa.bool_()),
        ("beyond_prior", pa.bool_()),
    ]
)
OWNERS = pa.schema([("owner", pa.string())])
USERS = pa.schema(
    [
        ("user", pa.string()),
        ("num_documents", pa.int64()),
        ("num_tokens", pa.int64()),
        ("unique", pa.int64()),
        ("unique_tokens", pa.int64()),
        ("longest", pa.int32()),
        ("max_ratio", pa.float64()),
    ]
)


def row(**changed: Any) -> dict[str, Any]:
    """One sequence, unique and seen once unless told otherwise."""
    plain = {
        "sequence": " very much", "token_ids": [5, 6], "num_tokens": 2,
        "total_in_s": 1, "users_in_s": 1, "total_in_d": 1, "users_in_d": 1,
        "contexts": ["Thank you"], "context_tokens": [2], "perplexities": [1.3], "public_perplexities": [3.9],
        "ratio": 3.0, "copied": False, "owner": "Viola",
    }  # fmt: skip
    return {**plain, **changed}


def sample_rows(
    num: int, *, seed: int = 0, public: bool = True, people: list[str] = PEOPLE
) -> list[dict[str, Any]]:
    """Plausible rows in the report's order: most short, some long, some shared, some copied."""
    draw = random.Random(seed)
    rows = [_sample_row(draw, place, public, people) for place in range(num)]
    return sorted(
        rows,
        key=lambda r: (
            -math.inf if r["ratio"] is None else -r["ratio"],
            -r["num_tokens"],
            r["token_ids"],
        ),
    )


def _sample_row(draw: random.Random, place: int, public: bool, people: list[str]) -> dict[str, Any]:
    words = draw.choice(LINES).split()
    length = min(1 + int(draw.expovariate(0.28)), len(words) - 1)
    start = draw.randrange(0, len(words) - length)
    users = 1 if draw.random() < 0.6 else draw.randint(2, 9)
    times = draw.choice([1, 1, 1, 2, 4])
    ours = sorted(1 + draw.expovariate(1.1) for _ in range(times))
    theirs = [p * math.exp(draw.gauss(1.2, 1.3)) for p in ours] if public else None
    written = max(times + draw.randint(0, 3), users)
    return row(
        sequence=" " + " ".join(words[start : start + length]),
        token_ids=[place, *range(length)][:length],
        num_tokens=length,
        total_in_s=times,
        users_in_s=min(users, times),
        total_in_d=written,
        users_in_d=users,
        contexts=[" ".join(words[:start]) or "" for _ in ours],
        context_tokens=[start + 40 * k for k, _ in enumerate(ours)],
        perplexities=ours,
        public_perplexities=theirs,
        ratio=max(t / o for t, o in zip(theirs, ours, strict=True)) if theirs else None,
        copied=draw.random() < 0.12,
        owner=draw.choice(people[: 1 + int(draw.expovariate(0.3))] or people)
        if users == 1
        else None,
    )


def by_text(rows: list[dict[str, Any]], leaks: dict[int, int]) -> list[dict[str, Any]]:
    """The rows as a report that counted words has them; `leaks` has the leak of unique rows."""
    return [
        {
            **one,
            "users_by_text": (1 if place in leaks else 5) if one["users_in_d"] == 1 else None,
            "unique_by_text": place in leaks,
            "leak": leaks.get(place),
        }
        for place, one in enumerate(rows)
    ]


def users_of(rows: list[dict[str, Any]], people: list[str] = PEOPLE) -> list[dict[str, Any]]:
    """users.parquet as the rows ask for it."""
    found = []
    for place, name in enumerate(people):
        own = [r for r in rows if r["owner"] == name]
        ratios = [r["ratio"] for r in own if r["ratio"] is not None]
        leaked = sum(r["num_tokens"] for r in own)
        found.append(
            {
                "user": name,
                "num_documents": 3 + place,
                "num_tokens": leaked + 500 + 37 * place,
                "unique": len(own),
                "unique_tokens": leaked,
                "longest": max((r["num_tokens"] for r in own), default=0),
                "max_ratio": max(ratios, default=None),
            }
        )
    return found


def summary_of(
    rows: list[dict[str, Any]], users: list[dict[str, Any]], **changed: Any
) -> dict[str, Any]:
    """summary.json as the rows ask for it."""
    unique = [r for r in rows if r["users_in_d"] == 1]
    ratios = [r["ratio"] for r in unique if r["ratio"] is not None]
    by_length: dict[str, int] = {}
    for r in unique:
        by_length[str(r["num_tokens"])] = by_length.get(str(r["num_tokens"]), 0) + 1
    plain = {
        "unique": len(unique), "unique_by_length": by_length,
        "curated": {t: sum(x >= float(t) for x in ratios) for t in ("1", "2", "10")} if ratios else None,
        "leakage_epsilon": max(ratios, default=None),
        "sequences_in_s": sum(r["total_in_s"] for r in rows), "distinct_sequences": len(rows),
        "users_with_unique": sum(u["unique"] > 0 for u in users), "fewer_than_p": sum(r["users_in_s"] < 5 for r in rows), "p": 5,
        "perplexity": 21.4, "accuracy": 0.2829, "top_k": 1, "validation_perplexity": 69.41, "validation_accuracy": 0.237,
        "public_unique": 159 if ratios else None, "num_users": len(users), "num_documents": 812, "num_tokens": 48_210,
        "model_fingerprint": "3fa9c1d27be04415aa90", "corpus_fingerprint": "b71e0c44f2d98a1100ee", "version": "0.1.0", "guarantee": None,
        "redacted": False, "public_model": "models/news-small" if ratios else None, "cross_tokenizer": False, "notes": [],
    }  # fmt: skip
    return {**plain, **changed}


def write_folder(
    folder: Path,
    rows: Iterable[dict[str, Any]],
    *,
    people: list[str] = PEOPLE,
    users: list[dict[str, Any]] | None = None,
    snapshots: dict[str, Any] | None = None,
    row_group: int = 1000,
    **changed: Any,
) -> Path:
    """A report folder. `changed` replaces keys of summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    users = users_of(rows, people) if users is None else users
    write_sequences(folder, iter(rows), row_group)
    pq.write_table(pa.Table.from_pylist(users, schema=USERS), folder / "users.parquet")
    (folder / "summary.json").write_text(json.dumps(summary_of(rows, users, **changed)))
    if snapshots is not None:
        (folder / "snapshots.json").write_text(json.dumps(snapshots))
    return folder


def write_sequences(folder: Path, rows: Iterator[dict[str, Any]], row_group: int) -> None:
    opening = list(islice(rows, row_group))
    schema = BY_TEXT if opening and "leak" in opening[0] else SEQUENCES  # 0.1 had no leaks
    rows = chain(opening, rows)
    with (
        pq.ParquetWriter(folder / "sequences.parquet", schema) as sequences,
        pq.ParquetWriter(folder / "owners.parquet", OWNERS) as owners,
    ):
        while group := list(islice(rows, row_group)):
            sequences.write_table(pa.Table.from_pylist(group, schema=schema))
            owners.write_table(pa.Table.from_pylist(group, schema=OWNERS))


def redacted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows as a redacted report stores them."""
    names: dict[str, str] = {}
    for r in rows:
        if r["owner"] is not None:
            names.setdefault(r["owner"], f"user {len(names) + 1}")
    return [
        {**r, "sequence": None, "token_ids": None, "contexts": None, "owner": names.get(r["owner"])}
        for r in rows
    ]


def sample_snapshots(num: int, *, validation: bool = True, seed: int = 0) -> dict[str, Any]:
    """A training run that fits ever better and, from the middle on, learns by heart."""
    draw = random.Random(seed)
    found = []
    for epoch in range(1, num + 1):
        unique = int(12 * epoch**1.6)
        lengths: dict[str, int] = {}
        for _ in range(unique):
            length = str(1 + int(draw.expovariate(0.55 - 0.3 * epoch / num)))
            lengths[length] = lengths.get(length, 0) + 1
        found.append(
            {
                "name": f"epoch-{epoch}",
                "step": 120 * epoch,
                "epoch": float(epoch),
                "summary": {"unique": unique, "leakage_epsilon": 2.0 + 3.1 * epoch},
                "unique_lengths": lengths,
                "unique_perplexities": [
                    1 + draw.expovariate(0.35 + epoch / num) for _ in range(min(unique, 2000))
                ],
                "train_perplexity": 180 / epoch**0.7,
                "validation_perplexity": 190 / epoch**0.55 + 0.35 * epoch**1.5
                if validation
                else None,
            }
        )
    best = min(found, key=lambda one: one["validation_perplexity"])["name"] if validation else None
    return {"snapshots": found, "best_validation": best}
