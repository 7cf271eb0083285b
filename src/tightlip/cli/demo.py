"""`tightlip demo`: the whole story on the bundled corpus."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Where the demo's files go.")] = Path("tightlip-demo"),
) -> None:
    """Train small models on Shakespeare's speakers: whose words they give away, and which less."""
    from rich.console import Console
    from rich.table import Table

    from tightlip.core.progress import shown_progress

    console = Console()
    console.print(
        "[bold]tightlip demo[/]: 110 of Shakespeare's speakers are the users. An LSTM learns their "
        "lines, far past the point where it should stop: it overfits on purpose, so that there is "
        "something to see. Five secrets are planted among the lines.\n"
    )
    from tightlip.api.demo import CANARIES, run_comparison, run_demo
    from tightlip.cli.compare import show
    from tightlip.report.terminal import snapshots_table

    with shown_progress():
        result = run_demo(out)
    console.print(snapshots_table(result.snapshots))
    planted = Table(title="\nPlanted secrets", title_justify="left", box=None, pad_edge=False)
    for name in ("secret", "speaker", "in training", "first told whole"):
        planted.add_column(name)
    for canary in CANARIES:
        when, times = result.first_told[canary.secret], result.times_trained[canary.secret]
        planted.add_row(canary.secret, canary.user, f"{times}×", when or "never")
    console.print(planted)
    report, best = result.report, result.snapshots["best_validation"]
    by_name = {row["name"]: row["summary"] for row in result.snapshots["snapshots"]}
    console.print(
        f"Validation would have stopped at [bold]{best}[/], with {by_name[best]['unique']:,} sequences "
        f"that one speaker alone wrote. Trained on, the model completes [bold]{report.unique:,}[/], "
        f"of {report.users_with_unique} of {report.num_users} speakers."
    )
    console.print(f"The report: [bold]{report.folder / 'report.html'}[/]", soft_wrap=True)
    console.print(
        "\n[bold]Second act[/]: the same lines, with 18 made-up secrets among them, learnt in four ways: as "
        "they are, with two privacy regularisers, and with differential privacy; and a control.\n"
    )
    with shown_progress():
        made = run_comparison(out)
    show(made, console)
