"""What a model gives away: one file per attack.

The package is also the call `tightlip.audit(model, corpus)`: docs/decisions/0005.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightlip.audit.settings import LeakageConfig
from tightlip.core.engines import EngineSettings
from tightlip.core.settings import takes
from tightlip.corpus.prepare_config import TextSettings
from tightlip.scan.options import ScanOptions

if TYPE_CHECKING:
    from tightlip.audit.leakage.summary import LeakageReport
    from tightlip.core.progress import Estimate


@takes(LeakageConfig, ScanOptions, TextSettings, EngineSettings, sends=True)
def audit(
    model: Any,
    corpus: Any = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    public_model: Any = None,
    validation: Any = None,
    snapshots: bool = False,
    keep_scan: bool = True,
    **settings: Any,
) -> "LeakageReport":
    """Which of the corpus' words the model gives away, and whose they are.

    `model` is a folder, a run that tightlip trained (then `corpus` defaults to what it was
    trained on and `validation` to what was held out), or a model in memory with `tokenizer`,
    or a pair of both. `public_model` is another, or 'base' for what an adapter was trained on,
    which is the default there, 'none', or 'leave-out'.
    `corpus` is a file or folder, a prepared corpus, an Arrow table, a DataFrame or a list.
    `snapshots` audits every snapshot of a run, or checkpoint of a Trainer. Without `out` the
    report lives as long as the object returned; sent to an object store it is redacted, unless
    `redact` is False, and can be read here until the process ends. The scan is kept in `scan/` beside the report
    unless `keep_scan` is False, the report is redacted or the model is in memory.
    """
    given = locals() | settings
    del given["settings"]
    from tightlip.commands import audit

    return audit(**given)


@takes(LeakageConfig, ScanOptions, TextSettings, EngineSettings, sends=True)
def estimate_audit(
    model: Any,
    corpus: Any = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    public_model: Any = None,
    validation: Any = None,
    snapshots: bool = False,
    keep_scan: bool = True,
    **settings: Any,
) -> "Estimate":
    """What `tightlip.audit` would take with the same arguments: seconds, memory and disk.

    Some rows of the corpus are audited in a temporary folder; nothing is written to `out`.
    """
    given = locals() | settings
    del given["settings"]
    from tightlip.audit.leakage.dry_run import estimate

    return estimate(**given, audit=audit)


# A function and a package cannot share a name otherwise: importing the package hides the function.
# So the function is the package, and has what the import system looks for in one.
vars(audit).update(globals())
audit.__name__ = __name__
sys.modules[__name__] = audit  # type: ignore[assignment]
