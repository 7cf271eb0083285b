"""`tightlip ledger` as one call."""

import math
from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.run_folder import LEDGER, RunRecord, open_run
from tightlip.privacy.accounting import Mechanism, epsilon_spent
from tightlip.privacy.composition import compose_runs
from tightlip.privacy.ledger import exact_figures, mode_of, read_ledger


def ledger(*runs: str | Path | RunRecord, delta: float | None = None) -> dict[str, Any]:
    """What a run may promise, finished or not; of several runs, what they may promise together.

    For one run ε is that of the steps it has charged so far, and `another_1000_steps` the ε that
    a thousand more would bring (None where there is no ε). `delta` reads several runs at a δ
    of your own.
    """
    if not runs:
        raise UsageError("No run was given. Run: tightlip ledger RUN [RUN...]")
    records = [_record_of(run) for run in runs]
    if len(records) == 1:
        return records[0] | {"another_1000_steps": _after(records[0], 1000)}
    return compose_runs(records, delta)


def _record_of(run: str | Path | RunRecord) -> dict[str, Any]:
    folder = (run if isinstance(run, RunRecord) else open_run(Path(run))).folder
    if not (folder / LEDGER).exists():
        raise UsageError(
            f"{folder} has no {LEDGER} yet: plain training writes it when it ends. Give the train "
            "command again to finish the run."
        )
    record = read_ledger(folder / LEDGER)
    if _has_steps_to_compose(record) and not record.get("finished"):
        # On the way the file holds an upper bound that jumps; here there is time for the figure.
        record |= exact_figures(record)
    return record


def _after(record: dict[str, Any], more: int) -> float | None:
    if not _has_steps_to_compose(record) or mode_of(record) in ("scale", "as-published"):
        return None  # what such a run promises does not grow step by step
    spent = epsilon_spent(Mechanism.of_record(record), record["steps"] + more, record["delta"])
    return spent if math.isfinite(spent) else None


def _has_steps_to_compose(record: dict[str, Any]) -> bool:
    """Whether the record has an ε and says enough to work it out again."""
    return all(
        record.get(name) is not None for name in ("epsilon", "noise_multiplier", "sampling_rate")
    )
