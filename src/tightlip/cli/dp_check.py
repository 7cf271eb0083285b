"""`tightlip audit RUN --dp-check`: what planted canaries say about the run's ε."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightlip.audit.dp_check import DPCheck


def dp_check(run: str, device: str, others: dict[str, Any]) -> None:
    """Check, print, and refuse to let an untrue ε stand."""
    from rich.console import Console

    from tightlip.core.errors import GuaranteeError, UsageError
    from tightlip.core.run_folder import DP_CHECK_RESULT, is_run

    if not is_run(Path(run)):
        raise UsageError(
            f"--dp-check looks at the canaries that a run was trained with, and {run} is no run of tightlip. "
            "Run: tightlip train CORPUS --mitigation dp --epsilon 2 --dp-check-canaries 1000 --out DIR"
        )
    if given := [name for name, value in others.items() if value]:
        raise UsageError(
            f"--dp-check makes no leakage report, so {given[0]} does not go with it. "
            f"Run: tightlip audit {run} --dp-check"
        )
    from tightlip.api.dp_check import check_run

    check = check_run(run, device=device)
    console = Console()
    for line in lines_of(check):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"The record: {Path(run) / DP_CHECK_RESULT}", soft_wrap=True, highlight=False)
    if check.verdict == "contradicted":
        raise GuaranteeError(
            f"{run} claims ε {check.claimed_epsilon:.3g}, and its canaries show at least "
            f"{rounded_down(check.epsilon_lower_bound)} at {check.confidence:.0%} confidence. Do not rely on the claim; "
            "train and check again, and report it if it is contradicted twice."
        )


def lines_of(check: "DPCheck") -> list[str]:
    """The finding in plain sentences."""
    guessed = (
        f"{check.num_correct:,} of {check.num_guesses:,} guesses about {check.num_canaries:,} canaries "
        f"were right; {check.num_guesses // 2:,} would be by chance."
    )
    bound = (
        f"ε is at least {rounded_down(check.epsilon_lower_bound)} at δ {check.delta:g}, "
        f"with {check.confidence:.0%} confidence."
    )
    if check.claimed_epsilon is None:
        return [guessed, bound, "The run claims no ε."]
    verdict = "contradicted" if check.verdict == "contradicted" else "not contradicted"
    return [guessed, bound, f"The run's claim, ε {check.claimed_epsilon:.3g}, is {verdict}."]


def rounded_down(epsilon: float) -> str:
    """Two decimals, never more than was shown.

    >>> rounded_down(1.239), rounded_down(0.0)
    ('1.23', '0.00')
    """
    return f"{math.floor(epsilon * 100) / 100:.2f}"
