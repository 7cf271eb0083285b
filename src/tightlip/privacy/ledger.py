"""The ledger of a run under way: every step is on record before it changes a weight.

`ledger.json` is replaced whole at each step, so a killed run may have charged a step that it
never took, and never the other way round. Its ε is that of all steps that were planned, from the
first one on: who stops early after a look at the results has chosen by them. `epsilon_so_far` is
an upper bound for its `steps`. Nothing else that depends on the data goes in: no losses, norms, batch sizes or randomness.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from tightlip.core.checksums import sealed
from tightlip.core.errors import GuaranteeError
from tightlip.core.files import OWNER_FILE, fsync, make_private_folder
from tightlip.core.run_folder import damaged_ledger, read_ledger_file
from tightlip.privacy.accounting import OWNED, Mechanism, accountant_at, epsilon_of, spend_of
from tightlip.privacy.adaptive import Promise
from tightlip.privacy.rdp_filter import RdpFilter

MECHANISM = "Poisson-subsampled Gaussian"
# Words about the promise may be put better in a later version, and whose text it is may become
# better known; everything else is the promise.
_NOT_PROMISED = (
    *("because", "covers", "outside", "run", "people", "before"),
    *("arithmetic_charged", "arithmetic_setting"),
)
_NO_PROMISE = "measured only"
# Which earlier ledgers do not have.
_SINCE_0_2 = ("planned_steps", "arithmetic", "arithmetic_charged")

Figures = Callable[[dict[str, Any]], dict[str, float | None]]  # from a record to its ε, three ways


class Meter(Protocol):
    """What a run promises after so many steps; an `EpsilonMeter`, or an adaptive run's promise."""

    mechanism: Mechanism
    delta: float

    def upper(self, steps: int) -> float:
        """At least the ε of a run of `steps` steps so far."""


def guarantee_terms(
    noise: Mechanism, /, *, unit: str, delta: float, **given: Any
) -> dict[str, Any]:
    """What a run promises before its first step and may not change after it: what `noise` and
    `unit` say of it, and whatever else is `given`.

    `noise_multiplier` is the least that any step can have, so that whoever composes it never
    counts too little; an adaptive run has its own beside it, under `adaptive`.
    """
    if (per_owner := noise.documents_per_owner) is not None:
        given = {"adjacency": OWNED, "documents_per_owner": per_owner} | given
    return {
        "mechanism": MECHANISM,
        "unit": unit,
        "adjacency": f"add or remove one {unit}",
        "sampling": "Poisson",
        "accountant": accountant_at(delta, per_owner),
        "delta": delta,
        "noise_multiplier": noise.noise_multiplier,
        "sampling_rate": noise.sampling_rate,
        "releases": [release.record() for release in noise.releases],
    } | given


def exact_figures(record: dict[str, Any]) -> dict[str, float | None]:
    """ε of a ledger's planned steps by PLD, by RDP, and as papers would print it; by PLD of those
    that were taken, too. None where infinite.

    Of a run whose noise varies: what it promises as a whole (`scale`), or, while it goes on, an
    upper bound of the figure that it will end with (`as-published`). Others would say nothing.
    """
    mechanism, steps, delta = Mechanism.of_record(record), record["steps"], record["delta"]
    if mode_of(record) in ("scale", "as-published"):
        return figures_of(promise_of(record).upper(steps))
    spend = spend_of(mechanism, most_steps(record), delta)
    figures = figures_of(*(epsilon_of(spend, way) for way in ("pld", "rdp", "published")))
    if "planned_steps" in record:
        figures |= so_far(epsilon_of(spend_of(mechanism, steps, delta), "pld"))
    return figures


def most_steps(record: dict[str, Any]) -> int:
    """Those that were planned, or taken where a killed run had to repeat some; earlier versions
    put no plan on record."""
    return max(int(record["steps"]), int(record.get("planned_steps") or 0))


def figures_of(
    epsilon: float, rdp: float = math.inf, published: float = math.inf
) -> dict[str, float | None]:
    """A record's three figures; one that is infinite is none."""
    figures = {"epsilon": epsilon, "epsilon_rdp": rdp, "epsilon_as_published": published}
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def so_far(epsilon: float) -> dict[str, float | None]:
    """The figure of the steps taken, for their owner: it is not the promise."""
    return {"epsilon_so_far": epsilon if math.isfinite(epsilon) else None}


def mode_of(record: dict[str, Any]) -> str | None:
    """The mode of an adaptive run's record; None for any other."""
    adaptive = record.get("adaptive")
    return None if adaptive is None else str(adaptive["mode"])


def promise_of(record: dict[str, Any]) -> Promise:
    """The promise that the ledger of a run whose noise varies speaks of."""
    adaptive = record["adaptive"]
    return Promise(
        Mechanism.of_record(record),
        record["delta"],
        adaptive.get("planned_steps") or 0,
        adaptive.get("epsilon"),
        filter_of(record),
    )


def filter_of(record: dict[str, Any]) -> RdpFilter | None:
    """The filter that a `scale` run was under; None where it was under none."""
    adaptive = record.get("adaptive") or {}
    if adaptive.get("rdp_budget") is None:
        return None
    return RdpFilter(
        order=adaptive["order"],
        budget=adaptive["rdp_budget"],
        sampling_rate=record["sampling_rate"],
    )


def steps_to_compose(record: dict[str, Any]) -> int | None:
    """How many steps at the record's noise count where a run is composed with others: the number
    that was planned. None where not even that covers a `scale` run, which ends by what it releases,
    and of a choice among trials.
    """
    if record.get("selection"):
        return None
    if mode_of(record) == "scale":
        return promise_of(record).counted(int(record["steps"]))
    return most_steps(record)


class Ledger:
    """What a run has spent, kept in a file that is never behind the weights.

    Holds:
        ahead: whenever the process dies, `steps` in the file is at least the updates applied.
        upper: ε in the file is at least the true ε of the file's `steps`, and of the planned ones.
        planned: no more steps are charged than were planned, but within a filter's budget, and but for
            those that a trainer `repeats` because a kill took them.
        terms: a run goes on only under the terms it began with.
        owner_only: nobody else can read the file.
    """

    def __init__(
        self,
        path: Path,
        terms: dict[str, Any],
        meter: Meter,
        steps: int = 0,
        state: Callable[[], dict[str, Any]] = dict,
        figures: Figures | None = None,
    ) -> None:
        assert Mechanism.of_record(terms) == meter.mechanism, "terms and meter differ"
        assert terms["delta"] == meter.delta, "terms and meter differ"
        self.path, self.steps = Path(path), steps
        self._terms, self._meter, self._state = terms, meter, state
        self._figures = figures or exact_figures
        self._finished = False
        # A filter's budget, fixed beforehand, bounds its steps; where nothing is promised, nothing does.
        bounded = terms["noise_multiplier"] and filter_of(terms) is None
        self._most_here = terms.get("planned_steps", math.inf) if bounded else math.inf
        self._charged_here, self.repeats = 0, False
        self.people: Callable[..., dict[str, Any]] | None = None  # see composition.PeopleMeter
        self.beyond_plan: Callable[[dict[str, Any]], None] | None = None  # see composition.enrolled
        self.ended: Callable[[dict[str, Any]], None] | None = None  # likewise
        self._beside = self.path.with_name(f"_{self.path.name}.partial")  # see `claimed`
        self.claim: IO[bytes] | None = None  # see `claimed`
        self._closed = False
        self.taken_back: str | None = None  # why the promise does not hold after all
        self.told: dict[str, Any] = {}  # of held-out text, with noise: see selection.py

    @classmethod
    def begin(cls, path: Path, terms: dict[str, Any], meter: Meter, **kept: Any) -> "Ledger":
        """A new run's ledger, on disk before its first step; `kept` as in the constructor."""
        ledger = cls(path, terms, meter, **kept)
        make_private_folder(ledger.path.parent)
        ledger._replace(ledger.record())
        ledger.settle()
        return ledger

    @classmethod
    def open(cls, path: Path, terms: dict[str, Any], meter: Meter, **kept: Any) -> "Ledger":
        """The ledger of a run that goes on: what it has charged stays charged."""
        there = read_ledger(Path(path))
        same_run = {"run": there["run"]} if "run" in there else {}
        whose = _whose_of_both(there, terms)
        ledger = cls(path, terms | same_run | whose, meter, there["steps"], **kept)
        wanted = terms if math.isfinite(ledger.promised) else terms | {"standing": _NO_PROMISE}
        differing = [name for name in terms if not _agrees(name, there, wanted[name])]
        if differing:
            # The noise for an ε follows from these, and these are what somebody changed.
            asked = ("num_units", "expected_batch", "planned_steps")
            name = next((each for each in asked if each in differing), differing[0])
            raise GuaranteeError(
                f"{path} was begun with {name}={there.get(name)!r} and would go on with "
                f"{wanted[name]!r}; one ε cannot cover both. Give the old settings, or use another folder."
            )
        ledger.told = there.get("noisy_validation", {})
        return ledger

    def close(self) -> None:
        """Let another training go on with this ledger; this one may charge nothing any more."""
        self._closed = True
        if self.claim is not None:
            self.claim.close()
            self.claim = None

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GuaranteeError(
                f"{self.path} was closed here, and another training may have gone on with it. Open it anew."
            )

    def charge(self) -> None:
        """Put one more step on record. Call it before the step's update is applied.

        Written and renamed (0.2 ms on ext4), not flushed: a killed process loses nothing it
        has written, and flushing each step would cost more than many a step.
        """
        self._refuse_if_closed()
        # When a process dies is nobody's data; a loop of one's own may also go on for what it saw.
        if (self._charged_here if self.repeats else self.steps) >= self._most_here:
            raise GuaranteeError(
                f"All {self._most_here} planned steps are taken, and ε is that of the plan: another one would be chosen after seeing "
                "what they gave. Plan for more steps, or begin a new run from this model; both together are then counted."
            )
        self.steps += 1
        self._charged_here += 1
        self._finished = False
        record = self.record()
        if self.beyond_plan is not None and self.steps > record.get("planned_steps", math.inf):
            self.beyond_plan(record)
        self._replace(record)

    def rewrite(self) -> None:
        """Put what was learnt since the last charge on record."""
        self._refuse_if_closed()
        self._replace(self.record())

    def settle(self) -> None:
        """Make what is charged survive a power cut. Call it before any weights reach the disk.

        A power cut may lose steps charged since; but then every checkpoint, snapshot and model on
        disk is from before them, and nobody has seen what they did.
        """
        fsync(self.path)
        fsync(self.path.parent)

    def finish(self) -> dict[str, Any]:
        """Close with the exact figures; the record."""
        self._refuse_if_closed()
        self._finished = True
        record = self.record()
        self._replace(record)
        self.settle()
        if self.ended is not None:
            self.ended(record)
        return record

    @property
    def epsilon(self) -> float:
        """At least what is spent so far; infinite without noise, or a promise."""
        return self._meter.upper(self.steps) if self.taken_back is None else math.inf

    @property
    def promised(self) -> float:
        """ε of all planned steps, from the first on; as published, of those taken."""
        record = self._terms | {"steps": self.steps}
        is_published = mode_of(record) == "as-published"
        most = self.steps if is_published else most_steps(record)
        return self._meter.upper(most) if self.taken_back is None else math.inf

    def record(self, *, exact: bool = False) -> dict[str, Any]:
        """The guarantee as it stands now; exactly once the run is finished, or where asked."""
        record = {**self._terms, "steps": self.steps, "finished": self._finished}
        record |= figures_of(self.promised)
        if "planned_steps" in record:
            record |= so_far(self.epsilon)
        if state := self._state():
            record["adaptive_state"] = state
        if self.told:
            record["noisy_validation"] = self.told
        if self._finished or exact:
            record |= self._figures(record)
        if record["epsilon"] is None:
            record |= {
                "standing": _NO_PROMISE,
                "because": f"A noise multiplier of {self._terms['noise_multiplier']:g} gives no finite ε.",
            }
        if self.taken_back is not None:
            record |= {**figures_of(math.inf), **so_far(math.inf), "standing": _NO_PROMISE}
            record["because"] = self.taken_back
        if self.people is not None:
            record["people"] = self.people(record, exact=self._finished or exact)
        return record

    def _replace(self, record: dict[str, Any]) -> None:
        text = json.dumps(sealed(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        descriptor = os.open(self._beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, OWNER_FILE)
        with os.fdopen(descriptor, "wb") as beside:
            beside.write(text.encode())
        os.replace(self._beside, self.path)


class ToldLedger(Ledger):
    """The same on the processes that are told by the first one, which alone keeps the file."""

    def settle(self) -> None:
        pass

    def _replace(self, record: dict[str, Any]) -> None:
        pass


def _whose_of_both(there: dict[str, Any], terms: dict[str, Any]) -> dict[str, Any]:
    """People and earlier runs of a run that goes on: what it began with is never forgotten."""
    people = dict.fromkeys([*ids_of(there), *ids_of(terms)])
    runs = [*there.get("before", ()), *terms.get("before", ())]
    before = {each.get("run") or place: each for place, each in enumerate(runs)}
    return ({"people": people_of((*people,))} if people else {}) | (
        {"before": [*before.values()]} if before else {}
    )


def people_of(ids: tuple[str, ...]) -> dict[str, Any]:
    """The ids of a run's people as its ledger names them: all but of merged corpora have one."""
    return {"id": ids[0], **({"also": list(ids[1:])} if ids[1:] else {})}


def ids_of(record: dict[str, Any]) -> list[str]:
    """The people that a ledger, or what was kept of one, names."""
    people = record.get("people") or {}
    return [people["id"], *people.get("also", ())] if people else []


def _agrees(name: str, there: dict[str, Any], wanted: Any) -> bool:
    """Whether a ledger's term is as wanted. What was measured of its arithmetic may differ, and
    not whether it is exact."""
    if name in _NOT_PROMISED or (name in _SINCE_0_2 and name not in there):
        return True
    if name == "arithmetic":
        return str(there[name]).partition(":")[0] == str(wanted).partition(":")[0]
    return bool(there.get(name) == json.loads(json.dumps(wanted)))


def claimed(path: Path) -> IO[bytes]:
    """A lock on the ledger for as long as it is held: two writers would lose each other's steps.

    Hubs are not sent names that begin like the lock's, nor like that of the next record on its way.
    """
    make_private_folder(path.parent)
    lock = path.with_name(f"_{path.name}.lock")
    held = os.fdopen(os.open(lock, os.O_CREAT | os.O_RDWR, OWNER_FILE), "r+b")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise GuaranteeError(
            f"{path} is being charged by another training, here or in another process. Wait for it to end, close() it, "
            "or give another ledger."
        ) from error
    return held


def read_ledger(path: Path) -> dict[str, Any]:
    """The record in `path`, or a refusal: without it nobody knows what was spent."""
    try:
        record, has_seal = read_ledger_file(path)
    except FileNotFoundError:
        raise GuaranteeError(
            f"{path} is missing, so nobody knows what the run has spent. Put it back, or train again "
            "in another folder."
        ) from None
    steps = record.get("steps")
    is_whole = {"mechanism", "epsilon", "standing", "because"} <= {*(record or ())}
    if not is_whole or not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise damaged_ledger(path)
    if not has_seal and not _is_enough(record):
        raise damaged_ledger(path)
    return record


def _is_enough(record: dict[str, Any]) -> bool:
    """Whether ε covers the steps that the record names, worked out again."""
    needed = ("epsilon", "noise_multiplier", "sampling_rate", "delta")
    if any(record.get(name) is None for name in needed):
        return True
    try:
        least = exact_figures(record)["epsilon"]
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return False
    return least is not None and record["epsilon"] >= least * (1 - 1e-6)
