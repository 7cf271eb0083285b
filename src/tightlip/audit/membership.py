"""Can one tell what a model was trained on? By document, and by user.

Every score of audit/membership_figures.py is measured, and one leads: it is named beforehand, or
chosen on users on whom nothing is reported.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit import membership_figures as scoring
from tightlip.audit.measures import Audited, written_to
from tightlip.audit.settings import MembershipSettings
from tightlip.audit.sides import Side, Sides
from tightlip.audit.subjects import Subject, made_from, measuring, nothing_held_out, subject_of
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.core.gates import Entries, Known
from tightlip.core.resampling import FEW_USERS
from tightlip.core.settings import split_settings, takes
from tightlip.core.stores import place_of, send, set_aside, worked_in
from tightlip.corpus.prepare_config import TextSettings
from tightlip.scan.options import ModelSettings
from tightlip.scan.scans import Scans, on_engine

NOT_PRIVATE = "The run's ε does not cover these figures: they are computed from the text itself. Keep them as private as the text."

NO_STRANGERS = (
    "Everybody with held-out text was trained on too, so nothing is said about users. "
    "Hold out whole users for that: a run with --split user."
)


# What a gate may ask for of documents; of users the same behind "user_".
_GATED = ("auc", "auc_low", *scoring.RATES)
_LEADING = "leading"  # in a score's place: the one that leads
_ENTRIES = (*scoring.SCORES, _LEADING)
FIGURES: Known = {
    **dict.fromkeys(("num_members", "num_nonmembers")),
    **{f"{of}{name}": Entries(names=_ENTRIES) for of in ("", "user_") for name in _GATED},
}


def gated(record: dict[str, Any]) -> dict[str, Any]:
    """The figures of a record as gates name them."""
    levels = {"": record["documents"], "user_": record["users"]}
    figures = {
        f"{of}{name}": None if level is None else _by_score(level, name, record.get(_LEADING))
        for of, level in levels.items()
        for name in _GATED
    }
    return figures | {name: record["documents"][name] for name in ("num_members", "num_nonmembers")}


def _by_score(
    level: dict[str, Any], name: str, leading: dict[str, Any] | None
) -> dict[str, float | None]:
    figure, end = ("auc", "low") if name == "auc_low" else (name, "value")
    known = {score: found for score, found in level["scores"].items() if found is not None}
    if leading is not None and leading["score"] in known:
        known |= {_LEADING: known[leading["score"]]}
    return {score: found[figure] and found[figure][end] for score, found in known.items()}


@takes(MembershipSettings, ModelSettings, TextSettings, EngineSettings, sends=True)
@on_engine(MembershipSettings, ModelSettings, TextSettings)
def measure_membership(
    model: Any,
    *,
    engine: Any = EngineSettings.engine,
    members: Any = None,
    non_members: Any = None,
    reference: Any = None,
    tokenizer: Any = None,
    without_texts: Collection[str] = frozenset(),
    out: str | Path | None = None,
    device: str = "auto",
    keep_scan: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """How well one can tell what a model was trained on, by document and by user.

    `model` is a folder, or a model in memory with `tokenizer`, or a pair of both; `members` is text
    that it was trained on and `non_members` is text that it was not, which a run knows itself.
    `reference` is a model or a run that saw neither, 'base' for what an adapter was
    trained on, a pair in memory, or a list of several of these. Documents that read as one of `without_texts`, planted canaries
    say, are on neither side. With `out`, a folder, the result is written to membership.json there,
    for its owner only. Scans are kept, in the run's `scan/` or in that of `out`, unless `keep_scan`
    is False or a model is in memory.
    """
    config, how, columns = split_settings(settings, MembershipSettings, ModelSettings, TextSettings)
    subject = subject_of(model, members, non_members, tokenizer=tokenizer, **columns.tree())
    _check_sides(subject)
    references = several(reference)
    keep = keep_scan and all(isinstance(one, str | Path) for one in references)
    asked = {"references": references, "without_texts": without_texts, "config": config}
    where = {"device": device, "engine": engine, **how.tree()}
    with worked_in(out, "membership") as folder:
        with measuring(subject, folder, keep=keep, **where) as (scans, work):
            result = membership_of(subject, scans, work, **asked)
        if place_of(out) is not None:
            # A hash of the text lets whoever knows all of it but a PIN try every PIN.
            result["made_from"] |= {"members": None, "held_out": None}
        written_to(None if folder is None else folder / "membership.json", result)
        send(folder, out, "membership")
        set_aside(folder, out)
    return result


def membership_of(
    subject: Subject,
    scans: Scans,
    work: Path,
    *,
    references: Sequence[Any],
    without_texts: Collection[str],
    config: MembershipSettings,
) -> dict[str, Any]:
    """The figures of a subject with both texts; its tokens are made in `work` where none stand."""
    run = subject.run
    if run is not None and (number := run.config["corpus"].get("num_users_left_out")):
        raise UsageError(
            f"{run.folder} was trained without {number:,} users of its corpus and does not say which, so nobody "
            "knows who the members are. Measure the run it was retrained from."
        )
    notes: list[str] = []
    sides = Sides(subject=subject, scans=scans, work=work, notes=notes)
    sides.leave_out(without_texts)
    sides.choose_tokens()
    sides.score(references)
    notes += scans.engine.notes
    members, others = sides.chosen()
    rng = np.random.default_rng(config.seed)
    leading = scoring.leading_score(has_reference=bool(references))
    if config.choose:
        draw = np.random.default_rng(config.seed)
        looked_at, (members, others) = scoring.halves(members, others, draw)
        leading = scoring.best_score(*looked_at)
        notes.append(
            f"The leading score was chosen on one half of the users. All figures are of the other half: "
            f"{len(np.unique(np.concatenate([members.users, others.users]))):,} users."
        )
    documents = scoring.measure_level(members, others, rng, config.num_bootstraps)
    lengths = scoring.by_length(members, others, rng, config.num_bootstraps)
    notes += [*scoring.missing_rates(documents, "documents"), *_about_users(members, others)]
    notes += _about_certainty(documents)
    # Of people, a non-member is somebody of whom nothing was trained on.
    strangers = others.chosen(others.users >= sides.train.num_users)
    users = None
    if len(strangers):
        people = members.by_user(), strangers.by_user()
        users = scoring.measure_level(*people, rng, config.num_bootstraps)
        again = np.random.default_rng(config.seed)
        notes += scoring.about_amounts(*people, again, config.num_bootstraps)
    notes += [NO_STRANGERS] if users is None else scoring.missing_rates(users, "users")
    for what, level in (("documents", documents), ("users", users)):
        notes += [] if level is None else scoring.unlike_the_leading(level, leading, what)
    names, again = map(_name_of, references), np.random.default_rng(config.seed)
    notes += scoring.about_references(members, others, names, again, config.num_bootstraps)
    notes += _about_the_text(subject)
    return {
        "leading": {"score": leading, "chosen": config.choose},
        "documents": documents,
        "users": users,
        "by_length": lengths,
        "not_counted": sides.not_counted,
        "made_from": made_from(subject, scans, members=sides.train, held_out=sides.held)
        | {"reference": _named(references)},
        "notes": notes,
    }


def several(reference: Any) -> list[Any]:
    """References as they may be given: none, one, or a list. A pair in memory is a tuple."""
    if reference is None:
        return []
    return list(reference) if isinstance(reference, list) else [reference]


def _name_of(one: Any) -> str:
    return "in memory" if isinstance(one, tuple) else str(getattr(one, "name", one))


def _named(references: Sequence[Any]) -> str | list[str] | None:
    names = [*map(_name_of, references)]
    return names if len(names) > 1 else next(iter(names), None)


class MembershipAudit:
    """Membership inference by every score, for documents and for users."""

    finds_secrets = True

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        reference = audited.measuring.reference_fingerprint
        return {"scores": [*scoring.SCORES], "reference": reference, **audited.sampling}

    def figures(self, audited: Audited) -> dict[str, Any]:
        _check_sides(audited.subject)
        return membership_of(
            audited.subject,
            audited.scans,
            audited.tokens,
            references=several(audited.measuring.reference),
            without_texts=audited.measuring.planted_texts,
            config=MembershipSettings(**audited.measuring.resampling.tree()),
        )

    def accuses(self, figures: dict[str, Any]) -> bool:
        area = figures["documents"]["scores"][figures["leading"]["score"]]["auc"]
        return area["low"] is not None and area["low"] > 0.5


def _check_sides(subject: Subject) -> None:
    if subject.members is not None and subject.held_out is not None:
        return
    if subject.run is not None:
        raise UsageError(nothing_held_out(subject.name))
    raise UsageError(
        f"{subject.name} does not tell what it was trained on and what not, as a run of tightlip does. Give both: "
        "--members FILE --non-members FILE"
    )


def _about_users(members: Side, others: Side) -> list[str]:
    fewest = min(len(np.unique(side.users)) for side in (members, others))
    if fewest >= FEW_USERS:
        return []
    if fewest == 1:
        return ["One user wrote all of one side, so there are no intervals: they need two or more."]
    return [f"Only {fewest} users wrote the documents of one side: take the intervals as rough."]


def _about_certainty(level: dict[str, Any]) -> list[str]:
    areas = [score["auc"] for score in level["scores"].values() if score is not None]
    if not any(area["low"] == area["high"] == 1 for area in areas):
        return []
    return [
        "An interval from 1 to 1 says that these documents show no exception, not that there is none: resampling "
        "cannot draw what was never seen."
    ]


def _about_the_text(subject: Subject) -> list[str]:
    lines, prepared, run = [], subject.prepared, subject.run
    if prepared is None or run is None or prepared.settings.get("validation"):
        lines.append(
            "The held-out text came as a file of its own. Where it differs from the training text in kind, in time or "
            "in who wrote it, that difference counts as membership here; a reference model takes most of it out."
        )
    if run is not None and run.guarantee.get("epsilon") is not None:
        lines.append(NOT_PRIVATE)
    return lines
