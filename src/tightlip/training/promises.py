"""By what right a private run promises something: what else shaped its weights, what is taken as public."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightlip.core import register
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import counted
from tightlip.core.progress import log
from tightlip.corpus.history import (
    ids_among,
    marks_of,
    origin_of,
    people_of,
    sources_of,
    still_prepared,
    vocabulary_behind,
)
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.public_text import stands_in
from tightlip.privacy.accounting import Release
from tightlip.privacy.people import declared_others, ids_of, num_other_people
from tightlip.privacy.plans import UNREGISTERED, Terms
from tightlip.training.config import BUILT_IN_MODELS, TrainConfig
from tightlip.training.mitigations import CorpusFacts
from tightlip.training.starting import runs_behind

_THEIRS = "nearly the same text, or from other text of the same people"
_NOT_COMPARED = ": the text is not to be found from here, so it was not compared with this one"
_MAYBE_THEIRS = ", though it learnt other text without privacy that may be of the same people"
_WORDS_MAYBE_THEIRS = (
    ", though its words were learnt without noise from other text that may be of the same people"
)


def terms_of(config: TrainConfig, corpus: CorpusFacts) -> Terms:
    """The standing of the run's promise: proved, or weaker on an explicit flag, or refused."""
    settings: Any = config.mitigation  # those of private training, which this mitigation has
    if corpus.has_co_owners and settings.unit == "user" and settings.num_check_canaries:
        raise UsageError(
            f"dp_check_canaries={settings.num_check_canaries} plants people with one text each, which would say little of owners of "
            "several. Check a run of --unit example, or leave it out."
        )
    _check_held_out(settings, corpus)
    words = words_behind(corpus, settings.unit)
    before = runs_behind(config)
    broken = list(breaches(config, corpus, words, before))
    if broken and not settings.allow_unproved:
        reasons = " ".join(f"{why} {instead}" for why, instead in broken)
        raise GuaranteeError(
            f"{reasons} As it is, no theorem covers this run. To go on all the same, add --allow-unproved: the standing is "
            f'then "as published" and says why.'
        )
    proved, releases = Terms(), [*corpus.releases, *words.releases]
    people = dict.fromkeys([*corpus.people, *(one for each in before for one in ids_of(each))])
    return Terms(
        standing="as published" if broken else proved.standing,
        because=" ".join(why for why, _ in broken) or proved.because,
        outside=(*proved.outside, *_taken_as_public(config, corpus, words, (*people,))),
        releases=tuple(_release(each, settings.unit) for each in releases),
        people=(*people,) if corpus.people else (),
        before=tuple(before),
    )


def _check_held_out(settings: Any, corpus: CorpusFacts) -> None:
    """Refuse to tell of held-out text that is not these units' own, each by itself."""
    if not settings.tells_validation:
        return
    if corpus.has_co_owners:
        raise UsageError(
            "noisy_validation hides what each writer holds out, and texts here have other owners too. Use --public-validation FILE."
        )
    if (split := corpus.settings.get("split")) not in ("text", "document"):
        raise UsageError(
            f"noisy_validation={settings.noisy_validation:g} tells of what each {settings.unit} of this corpus holds out, and "
            f"split={split!r} holds out nothing of the kind. Prepare it with --split text, or use --public-validation FILE."
        )


@dataclass(frozen=True, kw_only=True)
class Words:
    """What is known of a vocabulary that another corpus brought: what text of these people it was
    `learnt` from without noise, or what it cost them with noise, or what of it is `unknown`."""

    learnt: str = ""
    releases: tuple[dict[str, Any], ...] = ()
    unknown: str = ""


def words_behind(corpus: CorpusFacts, unit: str) -> Words:
    """What the corpus' words tell of its people, where they were not learnt from this very text.

    Noisy words of other text may have cost the same users: like a run on it they count, until its
    people are declared to be others. They cost no example of this text.
    """
    if corpus.folder is None or corpus.learnt_vocabulary or corpus.releases:
        return Words()
    marks, through = vocabulary_behind(corpus.folder)
    made_in = open_prepared(through[-1]) if through else None
    if made_in is None or made_in.settings.get("tokenizer") is not None:
        theirs = _THEIRS if marks & corpus.marks else theirs_in(corpus, marks)
        unknown = _NOT_COMPARED if marks else ", and nobody here knows where its words came from"
        return Words(learnt=theirs or "", unknown=unknown if theirs is None else "")
    learnt, releases = _THEIRS if made_in.learnt_vocabulary else "", (*made_in.releases,)
    if marks & corpus.marks or stands_in(corpus.folder, made_in.folder):
        return Words(learnt=learnt, releases=releases)
    if unit != "user" or {*people_of(made_in.folder)} <= declared_others({*corpus.people}):
        return Words()
    return Words(releases=releases, unknown=_WORDS_MAYBE_THEIRS if learnt else "")


def theirs_in(corpus: CorpusFacts, marks: set[str], *there: Path) -> str | None:
    """What text of these `marks` may be of these people, in words: it is nearly the same, `there` or
    where the register has it, or gone and not declared to be others'. None where nobody here can tell.

    Of what a copy of a model was made of, the ids beside it are all that is left.
    """
    if corpus.folder is None:
        return None
    lines = [each for each in register.entries(register.CORPUS) if marks & {*each["people"]}]
    folders = {*there, *filter(None, map(still_prepared, lines))}
    if any(stands_in(corpus.folder, each) for each in folders):
        return "nearly the same text"
    compared = [sources_of(each) for each in folders]
    gone = [each for each in lines if {*each["sources"]} not in compared]
    others = declared_others({*corpus.people})
    for each in gone:
        if not {*each["people"]} <= others:
            return (
                f"registered text that is not at {each.get('folder') or 'its place'} any more and may be of the same people "
                "(prepare it there again to have it compared, or this corpus with --other-people)"
            )
    known = set().union(*(each["people"] for each in lines), *map(marks_of, folders))
    return None if gone or ids_among(marks) - known or not folders else ""


def breaches(
    config: TrainConfig, corpus: CorpusFacts, words: Words, before: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """What shaped the weights outside the mechanism, and what to do instead: everything of the
    kind that METHODS section 6 lists and that we can see."""
    settings: Any = config.mitigation
    public = "Use a public tokenizer (--tokenizer DIR)"
    noisy = f"{public} or a noisy vocabulary (--vocabulary-noise 5)."
    if corpus.learnt_vocabulary:
        yield "The vocabulary was learnt from this corpus, so rare words show in it.", noisy
    if words.learnt and not any(run.get("releases") for run in before):
        yield (
            f"The vocabulary was learnt from {words.learnt}, so rare words show in it.",
            noisy,
        )
    yield from _cut_by_others(settings.unit, corpus.settings, "")
    for step in corpus.history:
        yield from _cut_by_others(settings.unit, step, " before this corpus was cut out")
    if corpus.has_co_owners and settings.unit == "user":
        yield from _taken_by_text([corpus.settings, *corpus.history])
        if corpus.releases or words.releases:
            yield (
                "The noise of the vocabulary hides each writer's words, and texts here have other owners too.",
                f"{public}.",
            )
    for name in ("early_stop", "until_perplexity"):
        is_told = corpus.validation_is_public or settings.tells_validation
        if getattr(config, name) is not None and not is_told:
            yield (
                f"{name} stops by looking at private validation text.",
                "Give --epochs or --steps instead, public text (--public-validation FILE), or noise (--noisy-validation 10).",
            )
    if config.model not in BUILT_IN_MODELS:
        yield from _trained_on_these(config.model, corpus)


def _trained_on_these(model: str, corpus: CorpusFacts) -> Iterator[tuple[str, str]]:
    """Whether the weights to start from learnt from the same people without privacy."""
    origin, instead = origin_of(Path(model)), "Start from public weights."
    if origin.openly & corpus.marks:
        yield (
            f"{model} was trained without privacy on this very corpus, on another part of the same text, or on other text of "
            "the same people.",
            instead,
        )
    elif theirs := theirs_in(corpus, origin.openly, *origin.open_folders):
        yield f"{model} was trained without privacy on {theirs}.", instead


def _cut_by_others(unit: str, made: dict[str, Any], when: str) -> Iterator[tuple[str, str]]:
    """What in a preparation lets one unit decide what is left of another."""
    if made.get("deduplicate", "none") != "none":
        yield (
            f"deduplicate={made['deduplicate']!r}{when} lets one {unit}'s text decide what is left of another's.",
            "Prepare the corpus without it.",
        )
    if made.get("split", "none") in (("user",) if unit == "user" else ("user", "document")):
        yield (
            f"split={made['split']!r}{when} holds out by number, so one {unit} more or less moves others in and out.",
            f"Use --split {'document' if unit == 'user' else 'text'} or none.",
        )


def _taken_by_text(made: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What in preparations lets a text decide whether it is there, and takes its owners' turn or not."""
    because = (
        "decides by a text whether it is there, and so which other texts of its owners are drawn."
    )
    if any(each.get("split") == "text" for each in made):
        yield f"split='text' {because}", "Use --split document or none."
    if any(each.get("bad_rows") == "skip" for each in made):
        yield f"bad_rows='skip' {because}", "Fix such rows, or take them out beforehand."


def _taken_as_public(
    config: TrainConfig, corpus: CorpusFacts, words: Words, people: tuple[str, ...]
) -> Iterator[str]:
    settings: Any = config.mitigation
    yield f"the number of {settings.unit}s, which counts as public"
    yield "what was done to the text before it was prepared, where its files do not tell"
    yield "when lines were logged and files written, which hangs on how many were drawn"
    given, is_new = corpus.settings.get("tokenizer"), config.model in BUILT_IN_MODELS
    if given is not None:
        yield f"the tokenizer {given}, taken to be public{words.unknown}"
    if corpus.validation_is_public:
        yield f"the validation text {corpus.settings['public_validation']}, which you declared public"
    if not is_new:
        yield f"what {config.model} was trained on before{_unknown(config.model, corpus)}"
    if given is not None or not is_new:
        # Always: to say it only where there are some would tell of the text.
        yield "texts of this corpus that also stand in what the start or its words were made from"
    if corpus.releases or words.releases:
        yield "noisy vocabularies of this text that no run was trained with"
    yield UNREGISTERED
    if others := num_other_people(people):
        corpora = counted(others, "corpus", "corpora")
        yield f"{corpora} registered here that you declared to be of other people"


def say_what_is_unknown(config: TrainConfig, corpus: CorpusFacts) -> None:
    """Warn of words and weights of which nobody here knows where they came from."""
    settings: Any = config.mitigation
    if config.model not in BUILT_IN_MODELS and (unknown := _unknown(config.model, corpus)):
        log.warning("What %s was trained on before is taken to be public%s.", config.model, unknown)
    given = corpus.settings.get("tokenizer")
    if (
        given is not None
        and given != config.model
        and (unknown := words_behind(corpus, settings.unit).unknown)
    ):
        log.warning("The tokenizer %s is taken to be public%s.", given, unknown)


def _unknown(model: str, corpus: CorpusFacts) -> str:
    """What nobody can tell of a model's history."""
    origin = origin_of(Path(model))
    if not origin.is_known:
        return ", of which nothing is known: it has no guarantee.json and stands in no run"
    if not origin.openly:
        return ""
    if theirs_in(corpus, origin.openly, *origin.open_folders) is None:
        return _NOT_COMPARED
    lines = [e for e in register.entries(register.CORPUS) if origin.openly & {*e["people"]}]
    people = set[str]().union(*(each["people"] for each in lines))
    return "" if people <= declared_others({*corpus.people}) else _MAYBE_THEIRS


def _release(record: dict[str, Any], unit: str) -> Release:
    """An earlier release, at what it costs one unit: a document more or less moves its writer's
    whole contribution, which costs more than a writer more or less."""
    name = "noise_multiplier" if unit == "user" else "example_noise_multiplier"
    if name not in record:
        raise UsageError(f"The release {record.get('name')!r} says nothing of unit={unit!r}.")
    return Release(
        name=record["name"],
        noise_multiplier=record[name],
        delta=record["delta"],
        note=record["note"],
    )
