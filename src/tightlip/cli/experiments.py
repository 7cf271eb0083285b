"""`tightlip reproduce` and `tightlip demo`: a paper's experiment on your own text, and a story."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import tightlip
from tightlip.cli import page_words, print_lines
from tightlip.cli.flags import OnDevice, option, with_settings
from tightlip.cli.measures import show_comparison
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed
from tightlip.core.progress import shown_progress, terminal
from tightlip.core.registry import unknown
from tightlip.core.settings import Settings, names_in, setting
from tightlip.report.kit.table import printed_table

_adaptive = partial(setting, None, panel="With adaptive")
_representation = partial(setting, None, panel="With representation")


@dataclass(frozen=True, kw_only=True)
class AdaptiveFlags(Settings):
    """What only the experiment of adaptive DP takes."""

    public_model: str | None = _adaptive(
        "The large public model, a folder or a .gguf file; by default a small LSTM is trained on the public text.",
        path="MODEL",
    )
    public_corpus: str | None = _adaptive(
        "Public text: for the tokenizer, and for what is ordinary.", path="CORPUS"
    )
    unit: str | None = _adaptive(
        "Whom to protect: user, example, or auto (user from 1,000 users on)."
    )


@dataclass(frozen=True, kw_only=True)
class RepresentationFlags(Settings):
    """What only the experiment of private vectors takes."""

    extractor: str | None = _representation(
        "A Hugging Face encoder's folder, lstm, or bag (default)."
    )
    bf16: bool | None = _representation("Train the encoder in bf16.", flag="--bf16")


EXPERIMENTS = {"adaptive": AdaptiveFlags, "representation": RepresentationFlags}


@with_settings(OnDevice, *EXPERIMENTS.values())
def reproduce(
    experiment: Annotated[
        str, typer.Argument(help="'adaptive' or 'representation'.", metavar="EXPERIMENT")
    ],
    given: dict[str, Any],
    corpus: Annotated[
        list[Path] | None,
        option(
            "CORPUS",
            "adaptive: a file with text, or user and text. representation: the paper's ag_data.txt, or Parquet with "
            "text, and age or gender. By default the bundled plays. May be given again.",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (minutes on a CPU), small (a GPU), or paper.")
    ] = "smoke",
    out: Annotated[Path | None, typer.Option(help="Where runs and results go.")] = None,
) -> None:
    """A paper's experiment, step by step by our own commands, with its own figures beside ours."""
    _check_experiment(experiment, given)
    out = out or Path(f"reproduce-{experiment}")
    call = getattr(tightlip, f"reproduce_{experiment}")
    with claimed(out), shown_progress():
        made = call(corpus or (), scale=scale, out=out, **given)
    _show_adaptive(made) if experiment == "adaptive" else _show_representation(made)


def _check_experiment(experiment: str, given: dict[str, Any]) -> None:
    """Refuse what is no experiment of ours, and a flag that is another's."""
    if experiment in ("leakage", "regularization"):
        raise UsageError(
            f"The experiment {experiment!r} is not there yet. Available: {', '.join(EXPERIMENTS)}."
        )
    if experiment not in EXPERIMENTS:
        raise UsageError(unknown("experiment", experiment, list(EXPERIMENTS)))
    others = {each: kind for each, kind in EXPERIMENTS.items() if each != experiment}
    owner_of = {name: each for each, kind in others.items() for name in names_in(kind)}
    for name in filter(owner_of.get, given):
        raise UsageError(
            f"--{name.replace('_', '-')} is for the experiment {owner_of[name]!r} and means nothing to {experiment!r}. "
            "Leave it out."
        )


def _show_adaptive(made: Any) -> None:
    from tightlip.experiments.adaptive_page import about, terminal_tables
    from tightlip.experiments.adaptive_tables import PAPER_NOTE, findings, headline, stopped_early

    console = terminal()
    console.print(headline(made.result), style="bold")
    for table in terminal_tables(made.result):
        console.print(table)
    console.print(PAPER_NOTE, style="dim")
    for section in made.result["corpora"]:
        console.print(Text.assemble("\n", (section["name"], "bold"), f": {about(section)}"))
        for sentence in findings(section):
            console.print(f"  {sentence}")
        for sentence in stopped_early(section):
            console.print(Text.assemble("  ", ("†", "yellow"), f" {sentence}"))
    print_lines([page_words(made.page)], console)


def _show_representation(made: Any) -> None:
    from tightlip.experiments import vectors_page as page

    console = terminal()
    console.print(page.headline(made.result), style="bold")
    console.print(page.certainty(made.result))
    for section in made.result["corpora"]:
        console.print(Text.assemble("\n", (section["name"], "bold"), f": {page.about(section)}"))
        for table in page.tables(section):
            console.print(table.printed())
            console.print()
        for sentence in page.findings(section):
            console.print(f"  {sentence}")
    console.print(page.PAPER_NOTE, style="dim")
    print_lines([page_words(made.page)], console)


def demo(
    out: Annotated[Path, typer.Option(help="Where the demo's files go.")] = Path("tightlip-demo"),
) -> None:
    """Train small models on Shakespeare's speakers: whose words they give away, and which less."""
    with claimed(out):
        _tell_the_story(out)


def _tell_the_story(out: Path) -> None:
    console = terminal()
    console.print(
        "tightlip demo: 110 of Shakespeare's speakers are the users. An LSTM learns their "
        "lines, far past the point where it should stop: it overfits on purpose, so that there is "
        "something to see. Five secrets are planted among the lines.\n"
    )
    from tightlip.experiments.demo import CANARIES, run_comparison, run_demo
    from tightlip.report.leakage.words import snapshots_table

    with shown_progress():
        result = run_demo(out)
    console.print(snapshots_table(result.snapshots))
    times, told = result.times_trained, result.first_told
    rows = [
        [each.secret, each.user, f"{times[each.secret]}×", told[each.secret] or "never"]
        for each in CANARIES
    ]
    headings = ["secret", "speaker", "in training", "first told whole"]
    console.print(printed_table(headings, rows, num_left=4, title="\nPlanted secrets"))
    report, best = result.report, result.snapshots["best_validation"]
    by_name = {row["name"]: row["summary"] for row in result.snapshots["snapshots"]}
    console.print(
        f"Validation would have stopped at {best}, with {by_name[best]['leaks']:,} pieces of text "
        f"that one speaker alone wrote. Trained on, the model completes {report.leaks:,}, "
        f"of {report.people_affected} of {report.num_users} speakers."
    )
    console.print(f"The report: {report.folder / 'report.html'}", soft_wrap=True)
    console.print(
        "\nSecond act: the same lines, with 18 made-up secrets among them, learnt in four ways: as "
        "they are, with two privacy regularisers, and with differential privacy; and a control.\n"
    )
    with shown_progress():
        made = run_comparison(out)
    show_comparison(made, console)
