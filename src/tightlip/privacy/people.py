"""Whose text a private run learnt from, and which other runs count for the same people.

A run is put into the register before its first step, under the ids of its people, with the most
that it will spend. It counts from then on, whatever becomes of its folder.
"""

from pathlib import Path
from typing import Any

from tightlip.core import register
from tightlip.core.errors import GuaranteeError, TightlipError
from tightlip.core.figures import counted
from tightlip.privacy.ledger import ids_of, people_of, read_ledger

Record = dict[str, Any]
# What of a ledger is needed to compose it with others. None of it is a hash of text.
_NEEDED = ("unit", "adjacency", "noise_multiplier", "sampling_rate", "delta", "steps", "standing")
_COMPOSED = (
    *("run", "unit", "adjacency", "noise_multiplier", "sampling_rate", "releases", "delta"),
    *("steps", "planned_steps", "epsilon", "adaptive", "corpus_fingerprint", "insecure_seed"),
    *("standing", "because", "arithmetic", "documents_per_owner", "selection"),
)


def composable(record: Record) -> Record:
    """What must be known of a run once its ledger is gone."""
    kept = {name: record[name] for name in _COMPOSED if name in record}
    if ids := ids_of(record):
        kept["people"] = people_of((*ids,))
    if kept.get("adaptive"):
        own = {name: value for name, value in kept["adaptive"].items() if name != "weights"}
        kept["adaptive"] = own
    return kept


def runs_before(guarantee: Record) -> list[Record]:
    """The private runs that a model came out of, by its `guarantee.json`, the last one first."""
    # One whose promise was taken back is among them, and leaves no ε: left out, it would cost nothing.
    # So is one without noise, but where it says what text it learnt: then that is compared.
    noise = guarantee.get("noise_multiplier")
    is_private = (
        noise or guarantee.get("selection") or (noise == 0 and "learnt_from" not in guarantee)
    )
    runs = [*([composable(guarantee)] if is_private else ()), *guarantee.get("before", ())]
    if not all({*_NEEDED} <= {*run} for run in runs):
        raise GuaranteeError(
            "A guarantee.json behind the model to start from does not say enough to be composed, so what it cost its people "
            "is not known. Put a whole copy back, or start from other weights."
        )
    return runs


def enrol(record: Record, ledger: Path) -> None:
    """Put a run into the register, once.

    Holds:
        once: a run that goes on is registered already; from another place, that place is.
        copied: of a run's folder and its copies one goes on, and the others are refused while it is
            still there, wherever it was moved to.
        older: of a run that ended, a copy from before that is refused wherever it stands.
    """
    path = ledger.resolve()
    entry = {"kind": register.RUN, "ledger": str(path), "terms": composable(record)}

    def unless_there(entries: list[register.Entry]) -> register.Entry | None:
        known = [each for each in entries if _is_of(each, record["run"])]
        if record["steps"] < (taken := _most_taken(known)):
            raise GuaranteeError(
                f"{path} has {record['steps']} steps on record, and its run ended with {taken}: it is an older copy, in which those since would "
                "be missing. Put the ledger of the end back, or begin another run in another folder."
            )
        for each in known:
            if each["ledger"] != str(path) and (there := _ledger_of(each)) is not None:
                # Of one that went on, what it did and told since would be missing here.
                has_more = there["steps"] > record["steps"]
                instead = (
                    f"; it has {there['steps']} steps on record"
                    if has_more
                    else ", or delete it first"
                )
                raise GuaranteeError(
                    f"{path} is a copy: {each['ledger']} is the ledger of the same run, and steps charged to one would be "
                    f"missing in the other. Go on with that one{instead}."
                )
        if known and known[-1]["ledger"] == str(path):
            return None
        return entry if not known else entry | {"terms": known[-1]["terms"]}

    register.add(unless_there)


def count_more(record: Record, ledger: Path, steps: int) -> None:
    """Put on record that a run, having been killed, takes up to so many steps, more than were planned."""
    terms = composable(record) | {"steps": steps}
    entry = {"kind": register.RUN, "ledger": str(ledger.resolve()), "terms": terms}

    def unless_there(entries: list[register.Entry]) -> register.Entry | None:
        known = [each["terms"] for each in entries if _is_of(each, record["run"])]
        return None if any(each["steps"] >= steps for each in known) else entry

    register.add(unless_there)


def note_end(record: Record) -> None:
    """Put on record with how many steps a registered run ended, so that no older copy of it goes on."""

    def unless_there(entries: list[register.Entry]) -> register.Entry | None:
        known = [each for each in entries if _is_of(each, record["run"])]
        if not known or _most_taken(known) >= record["steps"]:
            return None
        return known[-1] | {"taken": record["steps"]}

    register.add(unless_there)


def _most_taken(known: list[register.Entry]) -> int:
    return max((int(each.get("taken", 0)) for each in known), default=0)


def withdraw(record: Record, ledger: Path) -> None:
    """Put on record that a registered run's promise does not hold after all, or costs more; the last
    line of a run counts."""
    entry = {"kind": register.RUN, "ledger": str(ledger.resolve()), "terms": composable(record)}

    def unless_there(entries: list[register.Entry]) -> register.Entry | None:
        lines = [each["terms"] for each in entries if _is_of(each, record["run"])]
        return None if not lines or lines[-1].get("epsilon") is None else entry

    register.add(unless_there)


def runs_of(record: Record) -> list[Record]:
    """All runs that count for the people of a run, each once and as it stands, this one last: every
    registered one, whatever its text, but of those that were declared to be other people."""
    own, ids = record.get("run"), {*ids_of(record)}
    before = {each.get("run") or place: each for place, each in enumerate(record.get("before", ()))}
    runs: dict[Any, Record] = {}
    others = declared_others(ids)
    for entry in register.entries(register.RUN):
        terms = entry["terms"]
        if terms["run"] in before or not {*ids_of(terms)} <= others:
            runs[terms["run"]] = _as_it_stands(entry)
    runs = before | runs
    runs.pop(own, None)
    return [*runs.values(), record]


def is_registered(run: str) -> bool:
    """Whether this register knows of a run; another machine's, or one that was deleted, does not."""
    return any(_is_of(each, run) for each in register.entries(register.RUN))


def refuse_if_forgotten(there: Record) -> None:
    """Refuse to go on with a ledger whose people had other runs that this register knows nothing of."""
    num_others = (there.get("people") or {}).get("runs", 1) - 1 - len(there.get("before", ()))
    if num_others > 0 and not is_registered(there["run"]):
        raise GuaranteeError(
            f"{register.register_path()} does not know this run, which was registered beside {counted(num_others, 'other run')} on its "
            f"people: they would be counted no longer. Set {register.PLACE} to the register that it began with, or put that back."
        )


def num_other_people(ids: tuple[str, ...]) -> int:
    """How many corpora private runs were made on that were declared to be of other people."""
    others = declared_others({*ids})
    made_on = {tuple(ids_of(entry["terms"])) for entry in register.entries(register.RUN)}
    return sum({*each} <= others for each in made_on)


def declared_others(ids: set[str]) -> set[str]:
    """Ids of which somebody said that none of these people is among them; it holds both ways."""
    apart: set[str] = set()
    for entry in register.entries(register.CORPUS):
        theirs, declared = {*entry["people"]}, {*entry.get("apart", ())}
        if theirs & ids:
            apart |= declared
        if declared and ids <= declared:
            apart |= theirs
    return apart - ids


def _is_of(entry: register.Entry, run: str) -> bool:
    return bool(entry["kind"] == register.RUN and entry["terms"]["run"] == run)


def _as_it_stands(entry: register.Entry) -> Record:
    """A registered run, with the steps of its ledger where that can still be read."""
    terms: Record = entry["terms"]
    if (there := _ledger_of(entry)) is None:
        return terms
    fallen = {} if there["epsilon"] is not None else composable(there)
    return terms | fallen | {"steps": max(terms["steps"], there["steps"])}


def _ledger_of(entry: register.Entry) -> Record | None:
    try:
        there = read_ledger(Path(entry["ledger"]))
    except (TightlipError, OSError):
        return None
    return there if there.get("run") == entry["terms"]["run"] else None
