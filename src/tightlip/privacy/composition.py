"""Several runs together: their ledgers composed into one guarantee, or the reason why not."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.figures import NO_ARITHMETIC
from tightlip.core.register import as_it_stands, guarantee_beside
from tightlip.core.run_folder import LEDGER, RunRecord, is_run, open_run
from tightlip.core.settings import takes
from tightlip.privacy.accounting import (
    Mechanism,
    Release,
    Spend,
    accountant_at,
    delta_left,
    epsilon_of,
    epsilon_spent,
)
from tightlip.privacy.ledger import (
    Ledger,
    exact_figures,
    figures_of,
    filter_of,
    mode_of,
    most_steps,
    read_ledger,
    steps_to_compose,
)
from tightlip.privacy.people import (
    count_more,
    enrol,
    ids_of,
    is_registered,
    note_end,
    refuse_if_forgotten,
    runs_of,
)
from tightlip.privacy.rdp_filter import epsilon_of_rdp, release_rdp, subsampled_gaussian_rdp

_SETTLED = (
    "It would be proved for runs that were all settled beforehand, none of them by what another one gave, which nobody "
    "here knows."
)


@takes()
def ledger(*runs: str | Path | RunRecord, delta: float | None = None) -> dict[str, Any]:
    """What a run may promise, finished or not; of several runs, what they may promise together.

    For one run ε is that of the steps it was planned for, `epsilon_so_far` of those it has charged,
    and `another_1000_steps` what a thousand more than planned would bring (None where there is no
    ε). `people` is what all runs registered for the same people come to. `delta` reads several runs
    at a δ of your own.
    """
    if not runs:
        raise UsageError("No run was given. Run: tightlip ledger RUN [RUN...]")
    records = [_record_of(run) for run in runs]
    if len(records) > 1:
        same = bool(set.intersection(*({*ids_of(record)} for record in records)))
        joint = compose_runs(_with_earlier(records), delta, same_people=same)
        return joint | unless_settled(joint)
    if ids_of(records[0]) and records[0]["epsilon"] is not None:
        people, here = records[0]["people"], people_figure(runs_of(records[0]))
        # A register that does not know the run may know less of its people than its ledger does.
        if here["runs"] >= people.get("runs", 1) or is_registered(records[0]["run"]):
            people |= here
    return records[0] | {"another_1000_steps": _after(records[0], 1000)}


def enrolled(ledger: Ledger) -> None:
    """Register a run before its first step, and let its ledger say what all runs on the same people
    come to; who they are must be known, and the run must promise something."""
    record = ledger.record()
    if not ids_of(record) or record["epsilon"] is None:
        return
    refuse_if_forgotten(read_ledger(ledger.path))
    enrol(record, ledger.path)
    ledger.people = PeopleMeter(record)
    counted = 0

    def count(record: dict[str, Any]) -> None:
        nonlocal counted
        if record["steps"] > counted and record["epsilon"] is not None:
            counted = _next_point(record)
            count_more(record, ledger.path, counted)

    ledger.beyond_plan, ledger.ended = count, note_end
    ledger.rewrite()
    ledger.settle()


class PeopleMeter:
    """ε per person over all registered runs, cheap enough to ask at every step.

    Holds:
        planned: it is the same at every step that was planned; more steps never make it less.
        at_the_end: runs that were registered meanwhile count in snapshots and when the run is finished.
        kept: where the register was lost meanwhile, those that it knew at first count on.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self._others = runs_of(record)[:-1]
        self._known: dict[tuple[int, bool], dict[str, Any]] = {}

    def __call__(self, record: dict[str, Any], *, exact: bool) -> dict[str, Any]:
        """What the record says of its people; `exact` with what was registered by now."""
        is_asked = exact and is_registered(record["run"])
        if is_asked and (others := runs_of(record)[:-1]) != self._others:
            self._others, self._known = others, {}
        known = steps, _ = _next_point(record), record["epsilon"] is None  # as one taken back
        if known not in self._known or not self._others:
            self._known[known] = people_figure([*self._others, record | {"steps": steps}])
        return record["people"] | self._known[known]


def _next_point(record: dict[str, Any]) -> int:
    """At least the steps that count: sixteenths of the plan beyond it, doubling."""
    planned, steps = int(record["planned_steps"]), most_steps(record)
    stride = max(1, math.ceil(planned / 16))
    beyond = math.ceil((steps - planned) / stride)
    return planned + (stride * (1 << (beyond - 1).bit_length()) if beyond else 0)


def unless_settled(joint: dict[str, Any]) -> dict[str, str]:
    """The standing of several runs: whether to make another may have been decided by what one gave,
    and PLD composes only what was fixed beforehand. One run more never makes it a better one."""
    if joint["standing"] != "proved":
        return {}
    return {"standing": "as published", "because": f"{joint['because']} {_SETTLED}"}


def people_figure(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """ε per person over these runs, the last of which is asked about."""
    record = runs[-1]
    names = ("epsilon", "delta", "unit", "standing", "because", "arithmetic", "insecure_seed")
    if len(runs) == 1:
        return {**{name: record.get(name) for name in names}, "runs": 1}
    try:
        joint = compose_runs(runs, same_people=True)
    except UsageError as error:  # what was released took all of δ
        joint = {"standing": "measured only", "because": str(error)}
    if joint.get("epsilon") == math.inf:
        joint |= {
            "epsilon": None,
            "standing": "measured only",
            "because": "All runs together have no finite ε.",
        }
    joint |= unless_settled(joint)
    if joint.get("epsilon") is None:
        joint["because"] += (
            " Where the people of two corpora are others, say so: tightlip prepare CORPUS --other-people."
        )
    return {**{name: joint.get(name) for name in names}, "runs": len(runs)}


def _with_earlier(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that were given and those that their models came out of, each once."""
    given = {record.get("run"): record for record in records}
    before = [each for record in records for each in record.get("before", ())]
    by_run = {each["run"]: each for each in before if "run" in each and each["run"] not in given}
    return [*records, *by_run.values(), *(each for each in before if "run" not in each)]


def compose_runs(
    records: Sequence[dict[str, Any]], delta: float | None = None, *, same_people: bool = False
) -> dict[str, Any]:
    """What may be said of several runs together, from their ledgers.

    Every step and release of all runs is composed by PLD and read at one δ: the one given, or
    the smallest that any run was read at, or the largest where releases took all of that one. δs
    need no adding up, since no run's own (ε, δ) is used.
    A release of one prepared corpus that several runs built on was told once and counts once. Examples
    of two corpora are each other's only where they are of the `same_people`.

    Of runs of mode `scale` PLD must count every step with the least noise it could have had, and
    may come to more than what the runs promise. Two other ways are as sound, and the one of the
    smallest ε is taken: the Rényi budgets at one order, and the runs' own ε and δ added up, which
    are then those of a larger δ. `accountant` says which it was.

    Holds:
        alone: one run composed is that run.
        joint: the result is at least every run's own ε at that δ and at most their sum at the δs' sum.
        honest: a run without ε, or runs that protect different units, leave no joint ε.
    """
    because = _why_not_joint(records, same_people)
    joint: dict[str, Any] = {
        "mechanism": f"{len(records)} runs composed",
        **{name: _shared(records, name) for name in ("unit", "adjacency", "sampling", "clip_norm")},
        **dict.fromkeys(("epsilon", "epsilon_rdp", "epsilon_as_published", "delta", "accountant")),
        "arithmetic": _arithmetics(records),
        "steps": sum(record["steps"] for record in records),
        "standing": "measured only",
        "because": because,
        **{name: _all_of(records, name) for name in ("covers", "outside")},
        "releases": [],
        "insecure_seed": any(record.get("insecure_seed") for record in records),
        "finished": all(record.get("finished", True) for record in records),
        "num_runs": len(records),
    }
    if because:
        return joint
    releases, best = _distinct_releases(records), _cheapest(records, delta)
    return joint | {
        "epsilon": best.epsilon,
        **best.beside,
        "delta": best.delta,
        "accountant": best.accountant,
        "releases": [release.record() for release in releases],
        **_joint_standing(records, best.because),
    }


@dataclass(frozen=True, kw_only=True)
class _Composition:
    """One way to compose, which a theorem covers, and what it comes to."""

    epsilon: float
    delta: float
    accountant: str
    because: str
    beside: dict[str, float | None] = field(default_factory=dict)


def _cheapest(records: Sequence[dict[str, Any]], wanted: float | None) -> _Composition:
    """The composition of the smallest ε. A choice among trials has only its own ε and δ, which are
    added to those of all other runs."""
    chosen = [record for record in records if record.get("selection")]
    others = [record for record in records if not record.get("selection")]
    taken = sum(record["delta"] for record in chosen)
    if chosen and wanted is not None and (wanted <= taken if others else wanted < taken):
        raise UsageError(
            f"delta={wanted:g} is less than the choices among trials took ({taken:g}), and they cannot be read at another. "
            "Give a larger delta, or none."
        )
    best = _Composition(epsilon=0.0, delta=0.0, accountant="", because="")
    if others:
        left = None if wanted is None else wanted - taken
        ways = _compositions(others, _distinct_releases(others), left)
        best = min(ways, key=lambda each: (each.epsilon, each.delta))
        deltas = {record["delta"] for record in others}
        if wanted is None and min(deltas) < max(deltas) == best.delta:
            why = f"{best.because}, read at the largest δ, for releases took all of the smallest"
            best = replace(best, because=why)
    if not chosen:
        return best
    return _Composition(
        epsilon=best.epsilon + sum(record["epsilon"] for record in chosen),
        delta=best.delta + taken,
        accountant="the ε and δ of choices among trials, added to those of the other runs",
        because="ε and δ of each choice among trials added to those of all other runs",
    )


def _compositions(
    records: Sequence[dict[str, Any]], releases: tuple[Release, ...], wanted: float | None
) -> Iterator[_Composition]:
    deltas = [record["delta"] for record in records] if wanted is None else [wanted]
    is_taken = sum(release.delta for release in releases) >= min(deltas)
    # One run's very small δ is no reason for no figure: ε at a larger one holds as well.
    delta = max(deltas) if is_taken else min(deltas)
    counts = [steps_to_compose(record) for record in records]
    scaled = [record for record in records if mode_of(record) == "scale"]
    if all(count is not None for count in counts):
        yield _by_pld(records, releases, delta)
    if (orders := [each.order for each in map(filter_of, records) if each is not None]) and all(
        count is not None or filter_of(record) is not None
        for count, record in zip(counts, records, strict=True)
    ):
        yield _by_rdp(records, releases, delta, min(orders))
    total = sum(record["delta"] for record in records)
    published = any(mode_of(record) == "as-published" for record in records)
    if scaled and not published and (wanted is None or total <= wanted):
        yield _Composition(
            epsilon=sum(record["epsilon"] for record in records),
            delta=total,
            accountant="the runs' own ε and δ, added up",
            because="their own ε and their own δ added up, which is less than their steps composed at the least noise",
        )


def _by_pld(
    records: Sequence[dict[str, Any]], releases: tuple[Release, ...], delta: float
) -> _Composition:
    """A run whose noise varied counts as though every step had had the least it could."""
    steps = tuple((Mechanism.of_record(each), steps_to_compose(each) or 0) for each in records)
    spend = Spend(steps, releases, delta_left(releases, delta))
    modes = {mode_of(record) for record in records}
    varies = bool(modes & {"scale", "as-published"})
    least = ", steps of varying noise with the least that they could have" if varies else ""
    accountant = accountant_at(delta, max(each.documents_per_owner or 1 for each, _ in steps))
    published = math.inf if varies else epsilon_of(spend, "published")
    beside = figures_of(math.inf, epsilon_of(spend, "rdp"), published)
    del beside["epsilon"]
    return _Composition(
        epsilon=epsilon_of(spend, "pld"),
        delta=delta,
        accountant=accountant,
        because=f"every step composed by {accountant}{least}",
        beside=beside,
    )


def _by_rdp(
    records: Sequence[dict[str, Any]], releases: tuple[Release, ...], delta: float, order: int
) -> _Composition:
    """Divergences at one order add up. A budget at a higher order holds at a lower one too."""
    total = release_rdp(releases, order)
    for record in records:
        if (filtered := filter_of(record)) is not None:
            total += filtered.budget
        else:
            sigma, rate = record["noise_multiplier"], record["sampling_rate"]
            cost = subsampled_gaussian_rdp(order, sigma, rate)
            total += (steps_to_compose(record) or 0) * cost
    return _Composition(
        epsilon=epsilon_of_rdp(total * (1 + 1e-9), order, delta_left(releases, delta)),
        delta=delta,
        accountant=f"RDP at order {order}, filters with their whole budgets",
        because=f"Rényi divergences at order {order} added up, those of filters with their whole budgets",
    )


def _why_not_joint(records: Sequence[dict[str, Any]], same_people: bool) -> str | None:
    for number, record in enumerate(records, 1):
        if record.get("epsilon") is None:
            why = f" {record['because']}" if record.get("noise_multiplier") else ""
            return f"Run {number} has no ε of its own ({record['standing']}), so the runs together have none.{why}"
        if not record.get("selection") and not _has_steps_to_compose(record):
            return (
                f"Run {number} does not say how much noise each step had, so it cannot be composed."
            )
    for name in ("unit", "adjacency"):
        if len(kinds := {str(record[name]) for record in records}) > 1:
            return f"The runs differ in {name} ({' and '.join(sorted(kinds))}), so no one ε covers them together."
    if records[0]["unit"] != "user" and len(_corpora(records)) > 1 and not same_people:
        return "The runs saw different corpora, and an example of one is not an example of another."
    return None


def _joint_standing(records: Sequence[dict[str, Any]], because: str) -> dict[str, str]:
    """The weakest standing of all, with every reason for it."""
    weaker = [record for record in records if record["standing"] != "proved"]
    if weaker:
        return {
            "standing": weaker[0]["standing"],
            "because": " ".join(dict.fromkeys(str(record["because"]) for record in weaker)),
        }
    whose = "on one corpus"
    if (several := len(_corpora(records))) > 1:
        whose = f"on {several} corpora, as though everybody were in each"
    return {"standing": "proved", "because": f"{len(records)} runs {whose}: {because}."}


def _corpora(records: Sequence[dict[str, Any]]) -> set[Any]:
    """The corpora the runs saw; one that a ledger does not name is like no other."""
    return {record.get("corpus_fingerprint") or number for number, record in enumerate(records)}


def _distinct_releases(records: Sequence[dict[str, Any]]) -> tuple[Release, ...]:
    distinct = {
        (number if release.own else record.get("corpus_fingerprint") or number, release): release
        for number, record in enumerate(records)
        for release in (Release(**each) for each in record.get("releases", ()))
    }
    return tuple(distinct.values())


def _shared(records: Sequence[dict[str, Any]], name: str) -> Any:
    values = [record.get(name) for record in records]
    return values[0] if all(value == values[0] for value in values) else None


def _arithmetics(records: Sequence[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(each.get("arithmetic") or NO_ARITHMETIC for each in records))


def _all_of(records: Sequence[dict[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(item for record in records for item in record.get(name) or ()))


def _record_of(run: str | Path | RunRecord) -> dict[str, Any]:
    record = as_it_stands(read_ledger(_ledger_of(run)))
    if _has_steps_to_compose(record) and not record.get("finished"):
        # On the way the file holds an upper bound that jumps; here there is time for the figure.
        record |= exact_figures(record)
    return record


def _ledger_of(run: str | Path | RunRecord) -> Path:
    """A run's ledger, or that of a loop of one's own: the file, or the folder it lies in."""
    path = run.folder if isinstance(run, RunRecord) else Path(run)
    if path.is_file():
        return path
    if is_run(path) or not (path / LEDGER).exists():
        path = open_run(path).folder
    guarantee_beside(path)  # refused where a trainer's folder holds others' weights
    if not (path / LEDGER).exists():
        raise UsageError(
            f"{path} has no {LEDGER} yet: plain training writes it when it ends. Give the train "
            "command again to finish the run."
        )
    return path / LEDGER


def _after(record: dict[str, Any], more: int) -> float | None:
    if not _has_steps_to_compose(record) or mode_of(record) in ("scale", "as-published"):
        return None  # what such a run promises does not grow step by step
    spent = epsilon_spent(Mechanism.of_record(record), most_steps(record) + more, record["delta"])
    return spent if math.isfinite(spent) else None


def _has_steps_to_compose(record: dict[str, Any]) -> bool:
    """Whether the record has an ε and says enough to work it out again."""
    return all(
        record.get(name) is not None for name in ("epsilon", "noise_multiplier", "sampling_rate")
    )
