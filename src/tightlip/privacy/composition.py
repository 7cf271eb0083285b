"""Several runs together: their ledgers composed into one guarantee, or the reason why not."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tightlip.privacy.accounting import (
    Mechanism,
    Release,
    Spend,
    delta_left,
    epsilon_of,
    published_epsilon_of,
)
from tightlip.privacy.ledger import mode_of, steps_to_compose


def compose_runs(records: Sequence[dict[str, Any]], delta: float | None = None) -> dict[str, Any]:
    """What may be said of several runs together, from their ledgers.

    Every step and release of all runs is composed by PLD and read at one δ: the one given, or
    the smallest that any run was read at. δs need no adding up, since no run's own (ε, δ) is used.
    A release of one prepared corpus that several runs built on was told once and counts once.

    Holds:
        alone: one run composed is that run.
        joint: the result is at least every run's own ε and at most their sum at the δs' sum; where
            noise varied, steps count with the least they could have had, and it may be more.
        honest: a run without ε, or runs that protect different units, leave no joint ε.
    """
    because = _why_not_joint(records)
    joint: dict[str, Any] = {
        "mechanism": f"{len(records)} runs composed",
        **{name: _shared(records, name) for name in ("unit", "adjacency", "sampling", "clip_norm")},
        "epsilon": None,
        "epsilon_rdp": None,
        "epsilon_as_published": None,
        "delta": None,
        "accountant": None,
        "steps": sum(record["steps"] for record in records),
        "standing": "measured only",
        "because": because,
        "covers": _all_of(records, "covers"),
        "outside": _all_of(records, "outside"),
        "releases": [],
        "insecure_seed": any(record.get("insecure_seed") for record in records),
        "finished": all(record.get("finished", True) for record in records),
        "num_runs": len(records),
    }
    if because:
        return joint
    delta = min(record["delta"] for record in records) if delta is None else delta
    releases = _distinct_releases(records)
    # A run whose noise varied counts as though every step had had the least it could.
    steps = tuple((Mechanism.of_record(record), steps_to_compose(record)) for record in records)
    spend = Spend(steps, releases, delta_left(releases, delta))
    varies = any(mode_of(record) in ("scale", "as-published") for record in records)
    return joint | {
        "epsilon": epsilon_of(spend, "pld"),
        "epsilon_rdp": epsilon_of(spend, "rdp"),
        "epsilon_as_published": None if varies else published_epsilon_of(spend),
        "delta": delta,
        "accountant": "PLD",
        "releases": [asdict(release) for release in releases],
        **_joint_standing(records),
    }


def _why_not_joint(records: Sequence[dict[str, Any]]) -> str | None:
    for number, record in enumerate(records, 1):
        if record.get("epsilon") is None:
            return f"Run {number} has no ε of its own ({record['standing']}), so the runs together have none."
        if record.get("noise_multiplier") is None or record.get("sampling_rate") is None:
            return (
                f"Run {number} does not say how much noise each step had, so it cannot be composed."
            )
    for name in ("unit", "adjacency"):
        if len(kinds := {str(record[name]) for record in records}) > 1:
            return f"The runs differ in {name} ({' and '.join(sorted(kinds))}), so no one ε covers them together."
    if records[0]["unit"] != "user" and len(_corpora(records)) > 1:
        return "The runs saw different corpora, and an example of one is not an example of another."
    return None


def _joint_standing(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The weakest standing of all, with every reason for it."""
    weaker = [record for record in records if record["standing"] != "proved"]
    if weaker:
        return {
            "standing": weaker[0]["standing"],
            "because": " ".join(dict.fromkeys(str(record["because"]) for record in weaker)),
        }
    whose = (
        "on one corpus"
        if len(_corpora(records)) == 1
        else f"on {len(_corpora(records))} corpora, as though everybody were in each"
    )
    scaled = any(mode_of(record) == "scale" for record in records)
    least = " Steps of varying noise count with the least that they could have." if scaled else ""
    return {
        "standing": "proved",
        "because": f"Every step of {len(records)} runs {whose}, composed by PLD.{least}",
    }


def _corpora(records: Sequence[dict[str, Any]]) -> set[Any]:
    """The corpora the runs saw; one that a ledger does not name is like no other."""
    return {record.get("corpus_fingerprint") or number for number, record in enumerate(records)}


def _distinct_releases(records: Sequence[dict[str, Any]]) -> tuple[Release, ...]:
    distinct = {
        (record.get("corpus_fingerprint") or number, release): release
        for number, record in enumerate(records)
        for release in Mechanism.of_record(record).releases
    }
    return tuple(distinct.values())


def _shared(records: Sequence[dict[str, Any]], name: str) -> Any:
    values = [record.get(name) for record in records]
    return values[0] if all(value == values[0] for value in values) else None


def _all_of(records: Sequence[dict[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(item for record in records for item in record.get(name) or ()))
