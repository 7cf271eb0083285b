"""Choosing settings with privacy: a secret number of trials, of which only the best one leaves.

    trials.toml      mean = 10, or all = true; a [[candidate]] with its settings for each
    RUN/trials/      while it goes on, for its owner only: the draw, the trial under way, the best

How many trials there are and which candidate each one is are drawn once, before the first, and
gone at the end with all trials but the best. The choice is registered as one run.
"""

import math
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core import files, run_folder
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import rounded_up
from tightlip.core.processes import Processes
from tightlip.core.progress import log, task, unseen
from tightlip.core.randomness import keyed_generator
from tightlip.core.register import OWN_RECORD
from tightlip.core.registry import look_up
from tightlip.core.settings import Settings, read_toml, setting
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.privacy.accounting import Mechanism, check_delta, default_delta
from tightlip.privacy.composition import people_figure
from tightlip.privacy.ledger import figures_of, read_ledger
from tightlip.privacy.people import enrol, refuse_if_forgotten, runs_of, withdraw
from tightlip.privacy.plans import Terms
from tightlip.privacy.sampling import PoissonSampler
from tightlip.privacy.selection import Selection, drawn_number
from tightlip.training.checkpoints import Diverged
from tightlip.training.config import BUILT_IN_MODELS, RunOptions, TrainConfig
from tightlip.training.loop import train_model
from tightlip.training.mitigations import Mitigation
from tightlip.training.mitigations.dp import by_unit, dp_settings, noisy_loss, warn_if_loud
from tightlip.training.plan import Plan
from tightlip.training.recipe import Recipe, recipe_for
from tightlip.training.starting import model_card, starting_model, told_of

TRIALS, _DRAW = "trials", "draw.json"
# A choice goes on, or counts as done, where these agree; rows hang on the candidate.
_SAME = {"selection": (), "corpus": ("folder", "rows_fingerprint"), "start": ()}
# What makes the promise, the score or the secret: the same for every candidate.
_OF_ALL = (
    *("mitigation", "epsilon", "unit", "delta", "allow_loose_delta", "allow_unproved", "adaptive"),
    *("noisy_validation", "noisy_validation_bound", "insecure_seed", "dp_check_canaries", "trials"),
    *("dp_check_kind", "dp_check_engine"),
)
_BECAUSE = {
    True: "A secret number of trials of the logarithmic law, each one private; only the best is told of (Papernot and Steinke "
    "2022).",
    False: "Every candidate is trained once, and all of their steps are composed.",
}
_TIMES = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ", re.MULTILINE)  # of a log's lines
_OUTSIDE = "how long the choice took, which tells of the number of trials, and what its folder held meanwhile"


@dataclass(frozen=True, kw_only=True)
class Trials(Settings):
    """What is chosen among: `mean` trials of random candidates, or `all` candidates once."""

    mean: float | None = setting(None, "How many trials on average.", at_least=1.1, at_most=10_000)
    all: bool = setting(False, "Train each candidate once, and count them all.")
    candidate: tuple[dict, ...] = setting((), "The settings of one way to train.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mean is None) == (not self.all):
            raise UsageError(
                "Trials need mean = 10, how many there are on average, or all = true, each candidate once. Give one of them."
            )
        if not self.candidate:
            raise UsageError("There is nothing to choose among. Write a [[candidate]] for each.")


@dataclass(kw_only=True)
class Draw:
    """What is drawn once and kept from everybody, and how far the trials are."""

    candidates: list[int]
    names: list[int]  # random, as a folder's name may be seen; of two equals the smaller is better
    done: int = 0
    best: int | None = None
    score: float | None = None
    repeated: int = 0  # the most steps that a killed trial had to take again
    taken_back: str | None = None  # why a trial's own promise does not hold

    def note(self, score: float, ledger: dict[str, Any], planned: int) -> None:
        """Count the trial under way as done, and keep it if none was better.

        Holds:
            random_ties: of equals each is as likely to be kept.
            worst: one without a score is never kept.
        """
        number, self.done = self.done, self.done + 1
        best = (math.inf, 0) if self.best is None else (self.score, self.names[self.best])
        if math.isfinite(score) and (score, self.names[number]) < best:
            self.best, self.score = number, score
        self.repeated = max(self.repeated, ledger["steps"] - planned)
        if ledger.get("epsilon") is None:
            self.taken_back = ledger["because"]


def drawn(trials: Trials, generator: np.random.Generator) -> Draw:
    """How many trials, and which candidate each one is."""
    number = len(trials.candidate)
    chosen = list(range(number))
    if trials.mean is not None:
        chosen = generator.integers(0, number, drawn_number(trials.mean, generator)).tolist()
    return Draw(candidates=chosen, names=generator.integers(0, 2**62, len(chosen)).tolist())


def choose(
    corpus: PreparedCorpus, out: Path, config: TrainConfig, options: RunOptions
) -> run_folder.RunRecord:
    """Train trial after trial and leave the best one in `out`; go on where a choice stopped.

    Holds:
        once: a choice that was killed goes on with the draw that it began with.
        registered: before the first trial's first step, as one run with the ε of the choice.
        alone: of all trials but the best nothing is left, and nothing is shown on the way.
        counted: steps that a killed trial repeats count.
    """
    assert config.trials is not None
    _check_kind(config)
    trials = Trials.from_tree(read_toml(Path(config.trials)), config.trials)
    configs = [_candidate(config, own, number) for number, own in enumerate(trials.candidate, 1)]
    recipes = [recipe_for(corpus, out, each, options, frozenset()) for each in configs]
    _check_score(recipes[0])
    # Before anything is charged, and before its refusal would tell what was drawn.
    for each in recipes:
        if each.config.model in BUILT_IN_MODELS:
            starting_model(each.config, each.tokenizer, "meta")
    tree = recipes[0].tree | _selection_tree(trials, config)
    run_folder.check_may_train(out, tree, same=_SAME)
    if run_folder.is_finished(out):
        shutil.rmtree(out / TRIALS, ignore_errors=True)
        return run_folder.open_run(out)
    with files.claimed(out):
        choice = Choice(corpus, out, configs, options, tree)
        choice.begin(trials, recipes)
        with task("Choosing among trials", None), unseen():
            choice.run()
        choice.finish()
    return run_folder.open_run(out)


@dataclass
class Choice:
    """A choice under way: `record` is what it promises, `draw` its secret."""

    corpus: PreparedCorpus
    out: Path
    configs: list[TrainConfig]
    options: RunOptions
    tree: dict[str, Any]
    record: dict[str, Any] = field(init=False)
    draw: Draw = field(init=False)

    def __post_init__(self) -> None:
        self._file = self.out / TRIALS / _DRAW

    def begin(self, trials: Trials, recipes: list[Recipe]) -> None:
        """Settle noise and draw, and register the choice; or take all of it up again."""
        if (self.out / run_folder.LEDGER).exists():
            self.record = read_ledger(self.out / run_folder.LEDGER)
            if not self._file.exists():
                raise GuaranteeError(
                    f"{self._file} is missing, and drawing anew how many trials there are would make them more than is charged. "
                    "Put it back, or choose again with another --out."
                )
            refuse_if_forgotten(self.record)
        else:
            self.record = _promise(_selection(trials, recipes), recipes)
            run_folder.begin_run(self.out, self.tree)
            if not self._file.exists():
                self.draw = drawn(trials, keyed_generator())
                self._keep_draw()
            run_folder.write_ledger(self.out, self.record)
        if "people" in self.record:
            enrol(self.record, self.out / run_folder.LEDGER)
        self.draw = Draw(**files.read_sealed(self._file)[0])
        self.selection = Selection.of_record(self.record)
        _say_what_is_cheaper(self.selection)

    def run(self) -> None:
        self._drop_losers()  # a killed process may have been about to
        for number in range(self.draw.done, len(self.draw.candidates)):
            score, ledger = self._trial(number)
            _, planned = self.selection.candidates[self.draw.candidates[number]]
            self.draw.note(score, ledger, planned)
            self._keep_draw()
            self._drop_losers()

    def _trial(self, number: int) -> tuple[float, dict[str, Any]]:
        """Its score and its ledger; one that diverged, or has no score, is worse than any."""
        folder = self._folder(number)
        try:
            run = train_model(
                self.corpus, folder, self._config(number), self.options, is_trial=True
            )
        except Diverged:
            return math.inf, read_ledger(folder / run_folder.LEDGER)
        told = "noisy_" if self.configs[0].mitigation.tells_validation else ""
        score = run.metrics[-1][f"{told}validation_perplexity"]
        return math.inf if score is None else score, run.guarantee

    def _config(self, number: int) -> TrainConfig:
        """The candidate that the trial drew, with the noise that was settled for it."""
        place = self.draw.candidates[number]
        config, (mechanism, _) = self.configs[place], self.selection.candidates[place]
        noise = {"epsilon": None, "noise_multiplier": mechanism.noise_multiplier}
        return replace(config, mitigation=replace(config.mitigation, **noise))

    def finish(self) -> None:
        """Leave the best trial as the run, under the promise of the choice; its ledger comes last."""
        if self.draw.best is None:
            self._final_promise()  # what killed trials repeated counts all the same
            shutil.rmtree(self.out / TRIALS)
            raise UsageError(
                f"No trial came to a score: all of them diverged. What they cost stays charged, and nothing of them is told. "
                f"Use smaller learning rates, and another --out than {self.out}."
            )
        best = self._folder(self.draw.best)
        final = read_ledger(best / run_folder.LEDGER) | self._final_promise()
        final |= _people(final)
        final.pop("epsilon_so_far", None)
        for name in (run_folder.MODEL, run_folder.MERGED, run_folder.SNAPSHOTS):
            if (best / name).exists():  # or a killed process moved it already
                shutil.rmtree(self.out / name, ignore_errors=True)
                os.rename(best / name, self.out / name)
        for name in (run_folder.METRICS, run_folder.PRIVATE_METRICS, run_folder.LOG):
            if (best / name).is_file():
                files.write_text(self.out / name, _TIMES.sub("", files.read_text(best / name)))
        for pattern in (run_folder.MODEL, run_folder.MERGED, f"{run_folder.SNAPSHOTS}/*-*"):
            for folder in filter(Path.is_dir, self.out.glob(pattern)):
                _write_card(folder, final)
        recipe = recipe_for(
            self.corpus, self.out, self._config(self.draw.best), self.options, frozenset()
        )
        run_folder.begin_run(self.out, recipe.tree | {"selection": self.tree["selection"]})
        self._forget_times()
        run_folder.write_ledger(self.out, final | {"finished": True})
        shutil.rmtree(self.out / TRIALS)

    def _forget_times(self) -> None:
        """Give all files one time: those of the best trial's would tell how many came after it."""
        for path in (*self.out.rglob("*"), self.out):
            os.utime(path, follow_symlinks=False)

    def _final_promise(self) -> dict[str, Any]:
        """The promise with what was learnt on the way: repeated steps, or that there is none."""
        own = ("steps", "arithmetic")  # as the trial has them
        promise = {name: value for name, value in self.record.items() if name not in own}
        if self.draw.repeated:
            selection = self.selection.with_more_steps(self.draw.repeated)
            promise |= figures_of(selection.epsilon()) | {"selection": selection.record()}
            log.warning(
                f"The choice costs ε {rounded_up(selection.epsilon())}, where {rounded_up(self.selection.epsilon())} was planned: a killed "
                f"trial took {self.draw.repeated} steps again, and they count for every candidate."
            )
        if self.draw.taken_back is not None:
            promise |= figures_of(math.inf)
            promise |= {"standing": "measured only", "because": self.draw.taken_back}
        if promise["epsilon"] != self.record["epsilon"] and "people" in promise:
            withdraw(promise | {"steps": 0}, self.out / run_folder.LEDGER)
        return promise

    def _folder(self, number: int) -> Path:
        return self.out / TRIALS / f"trial-{self.draw.names[number]:x}"

    def _keep_draw(self) -> None:
        files.write_sealed(self._file, asdict(self.draw))

    def _drop_losers(self) -> None:
        for number in range(self.draw.done):
            if number != self.draw.best:
                shutil.rmtree(self._folder(number), ignore_errors=True)
            else:
                shutil.rmtree(self._folder(number) / run_folder.CHECKPOINT, ignore_errors=True)


def _candidate(config: TrainConfig, own: dict[str, Any], number: int) -> TrainConfig:
    """The run's settings with a candidate's own."""
    where = f"{config.trials}, candidate {number}"
    if shared := sorted({*own} & {*_OF_ALL}):
        raise UsageError(f"{where}: {shared[0]} is the same for all. Give it to the command.")
    if own.get("model", BUILT_IN_MODELS[0]) not in BUILT_IN_MODELS:
        raise UsageError(
            f"{where}: model={own['model']!r} is a folder, and all trials start from the same. Give it to the command."
        )
    tree = {name: value for name, value in config.tree().items() if name != "trials"}
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in own:
            tree.pop(other, None)
    try:
        return TrainConfig.of(**tree | own)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _check_kind(config: TrainConfig) -> None:
    settings = dp_settings(config)
    if not settings.is_private or getattr(settings, "adaptive", "clip") != "clip":
        raise UsageError(
            f"trials={config.trials!r} are for private training whose noise is the same at every step: mitigation='dp', or "
            "'adaptive-dp' with adaptive='clip'. Train others one by one, and compare them by tightlip compare."
        )
    checked = settings.num_check_canaries or getattr(settings, "dp_check_engine", None)
    if settings.insecure_seed is not None or checked:
        raise UsageError(
            "Trials take neither insecure_seed nor canaries of dp-check: they are for single runs. Leave them out."
        )


def _check_score(recipe: Recipe) -> None:
    """Refuse to choose by anything but public text or noise that is charged, and where what a trial
    costs has no Rényi divergence to go by."""
    if recipe.corpus.has_co_owners and dp_settings(recipe.config).unit == "user":
        raise UsageError(
            "Trials are accounted for by Rényi divergences, and of texts with several owners none is known. Train once, with "
            "settings found on public text."
        )
    if Processes.here().are_several:
        raise UsageError("Trials are taken one after the other by one process. Start only one.")
    is_told = recipe.corpus.validation_is_public or recipe.config.mitigation.tells_validation
    if not is_told or recipe.validation is None:
        raise UsageError(
            "Trials are chosen by their perplexity on public text, or by that on held-out text told with noise. Add "
            "--public-validation FILE, or --noisy-validation 10."
        )


def _selection(trials: Trials, recipes: list[Recipe]) -> Selection:
    """The candidates as the accounting has them, with noise for the target where there is one."""
    settings = dp_settings(recipes[0].config)
    counts = [len(np.unique(by_unit(each.rows, settings.unit).unit_of_row)) for each in recipes]
    delta = default_delta(max(counts)) if settings.delta is None else settings.delta
    check_delta(delta, max(counts), settings.allow_loose_delta, unit=settings.unit)
    warn_if_loud(recipes[0].config, recipes[0].corpus, counts[0], len(recipes[0].tokenizer))
    made = []
    for recipe, num_units in zip(recipes, counts, strict=True):
        config = recipe.config
        mitigation: Mitigation = look_up("mitigation", config.mitigation.name)()
        mitigation.check(config, recipe.corpus)
        per_epoch = mitigation.steps_per_epoch(recipe.rows, config)
        noise, noisy = dp_settings(config).noise_multiplier, noisy_loss(config, per_epoch)
        sampler = PoissonSampler(num_units, config.batch_size, keyed_generator())
        mechanism = Mechanism(
            noise_multiplier=1.0 if noise is None else noise,
            sampling_rate=sampler.sampling_rate,
            releases=() if noisy is None else (noisy.release(),),
        )
        made.append((mechanism, Plan(config=config, steps_per_epoch=per_epoch).num_steps))
    before = mitigation.terms(recipes[0].config, recipes[0].corpus).releases  # type: ignore[attr-defined]
    given = any(dp_settings(each.config).noise_multiplier is not None for each in recipes)
    if settings.epsilon is not None and given:
        raise UsageError(
            f"epsilon={settings.epsilon:g} is what the whole choice may cost, and the noise of each trial follows from it. Leave "
            "noise_multiplier out, or epsilon."
        )
    selection = Selection(candidates=(*made,), mean=trials.mean, before=before, delta=delta)
    return selection if settings.epsilon is None else selection.calibrated(settings.epsilon)


def _promise(selection: Selection, recipes: list[Recipe]) -> dict[str, Any]:
    """The choice's ledger before its first trial, on the weakest terms of any candidate."""
    settings = dp_settings(recipes[0].config)
    mitigation = look_up("mitigation", settings.name)()
    every: list[Terms] = [mitigation.terms(each.config, each.corpus) for each in recipes]
    terms = next((each for each in every if each.standing != "proved"), every[0])
    proved = terms.standing == "proved"
    promise = {
        "mechanism": "selection among trials",
        "unit": settings.unit,
        "adjacency": f"add or remove one {settings.unit}",
        "sampling": "Poisson",
        "accountant": selection.accountant,
        **figures_of(selection.epsilon()),
        "delta": selection.delta,
        **dict.fromkeys(("noise_multiplier", "sampling_rate")),
        "releases": [release.record() for release in selection.before],
        "selection": selection.record(),
        "corpus_fingerprint": recipes[0].corpus.name,
        "run": secrets.token_hex(16),
        "steps": 0,
        "planned_steps": max(steps for _, steps in selection.candidates),
        "arithmetic": "as each trial has it",
        "standing": terms.standing,
        "because": _BECAUSE[selection.mean is not None] if proved else terms.because,
        "covers": [*terms.covers, "which settings were chosen, and their score"],
        "outside": [*terms.outside, _OUTSIDE],
        **terms.whose(),
        "finished": False,
    }
    if promise["epsilon"] is None:
        raise UsageError(
            "The trials have no finite ε. Use more noise, such as --noise-multiplier 1."
        )
    return promise | _people(promise)


def _people(record: dict[str, Any]) -> dict[str, Any]:
    """What all runs on the same people come to, this choice included."""
    if "people" not in record:
        return {}
    return {"people": record["people"] | people_figure(runs_of(record))}


def _say_what_is_cheaper(selection: Selection) -> None:
    if selection.mean is None:
        return
    chosen, composed = selection.epsilon(), selection.composed()
    if composed < chosen:
        log.warning(
            "Training each of the %d candidates once and counting them all is cheaper: ε %s with the same noise, where the best "
            "of %g random trials costs %s. Write all = true in place of mean.",
            *(len(selection.candidates), rounded_up(composed), selection.mean, rounded_up(chosen)),
        )


def _selection_tree(trials: Trials, config: TrainConfig) -> dict[str, Any]:
    """What was chosen among, as config.toml keeps it."""
    shared = {name: value for name, value in config.tree().items() if name != "trials"}
    return {"selection": {**trials.tree(), "of": shared}}


def _write_card(folder: Path, promise: dict[str, Any]) -> None:
    """Put the promise of the choice where a trial's own stood."""
    own, adapter = files.read_json(folder / OWN_RECORD), folder / "adapter_config.json"
    card = own | told_of(promise) | {"steps": own["steps"]}
    base = files.read_json(adapter)["base_model_name_or_path"] if adapter.is_file() else None
    files.write_json(folder / OWN_RECORD, card)
    files.write_text(folder / "README.md", model_card(card, base))
