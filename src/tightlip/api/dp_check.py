"""`tightlip audit RUN --dp-check` as one call."""

from pathlib import Path

from tightlip.api.audit import usable_device
from tightlip.audit.canary_scores import scores_of
from tightlip.audit.dp_check import DPCheck, check_guesses
from tightlip.core.canary_key import read_key
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.run_folder import DP_CHECK, DP_CHECK_RESULT, RunRecord, open_run

# For a run that claims nothing: small enough to weigh nothing beside a few thousand canaries.
DELTA_WITHOUT_CLAIM = 1e-5


def check_run(
    run: str | Path | RunRecord, *, device: str = "auto", confidence: float = 0.95
) -> DPCheck:
    """A lower bound on the run's ε from its planted canaries, beside the ε its ledger claims.

    Also written to RUN/dp_check_result.json. A bound above the claim means that the claim is
    untrue, or that this was one of the 5 in 100 honest runs that look so.
    """
    record = run if isinstance(run, RunRecord) else open_run(Path(run))
    if not record.finished:
        raise UsageError(f"{record.folder} is not finished training. Give its train command again.")
    key_file = record.folder / DP_CHECK
    if not key_file.exists():
        raise UsageError(
            f"{record.folder} was trained without canaries, so there is nothing to guess. "
            "Run: tightlip train CORPUS --mitigation dp --epsilon 2 --dp-check-canaries 1000 --out DIR"
        )
    claimed = record.guarantee.get("epsilon")
    check = check_guesses(
        scores_of(record.model_folder, key_file, usable_device(device)),
        read_key(key_file).included_M,
        claimed_epsilon=claimed,
        delta=DELTA_WITHOUT_CLAIM if claimed is None else record.guarantee["delta"],
        confidence=confidence,
    )
    write_json(record.folder / DP_CHECK_RESULT, check.to_json())
    return check
