"""What joins stages: call one, then write its page."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tightlip
from tightlip.audit.leakage.findings import WORK
from tightlip.audit.leakage.summary import LeakageReport
from tightlip.audit.measures import MEASURES
from tightlip.audit.settings import ExtractionConfig, Matching, ResamplingSettings, SyntheticConfig
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed, make_private_folder, names_in, write_json, write_text
from tightlip.core.run_folder import RunRecord
from tightlip.core.settings import split_settings, takes
from tightlip.core.stores import place_of, send, set_aside, worked_in
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.prepare_config import ColumnSettings, TextSettings
from tightlip.corpus.privacy_weights import PrivacyWeights, WeightsConfig
from tightlip.scan.options import Decoding, ModelSettings, ScanOptions
from tightlip.scan.store import SCAN
from tightlip.vectors.settings import AttackSettings, EncodingOptions

if TYPE_CHECKING:
    from tightlip.audit.compared import Row
    from tightlip.audit.extraction.report import ExtractionReport
    from tightlip.audit.synthetic.audit import TextReport
    from tightlip.vectors.attack_runs import AttackReport

CSV, JSON, PAGE = "comparison.csv", "comparison.json", "comparison.html"
REPORT_PAGE = "report.html"


def audit(model: Any, corpus: Any = None, **settings: Any) -> LeakageReport:
    """What `tightlip.audit` does: audit, then draw the page."""
    from tightlip.audit.leakage.audit import audit_model

    def retrain(run: RunRecord, without: frozenset[int], out: Path) -> RunRecord:
        from tightlip.training.run import retrain_without  # with all that training takes

        return retrain_without(run, without, out)

    return _reported(partial(audit_model, model, corpus, retrain=retrain), "leakage", settings)


def _reported(make: Callable[..., Any], page: str, settings: dict[str, Any]) -> Any:
    """The report that `make` writes with its page, in `out` or sent to that address on a store:
    what leaves the machine is redacted, unless somebody asks for the text by name."""
    from tightlip.report.kit import write_page

    out = settings.pop("out", None)
    settings |= {} if (is_local := place_of(out) is None) else {"redact": True, **settings}

    def write_report(folder: Path) -> None:
        write_page(page, folder / REPORT_PAGE, folder=folder)
        send(folder, out, page)  # before the scan goes: where it fails, the same command goes on

    with worked_in(out, page, settings.get("redact")) as folder:
        report = make(out=folder, write_page=write_report, **settings)
        return report if is_local else type(report)(set_aside(folder, out))


@takes(ExtractionConfig, Decoding, ScanOptions, TextSettings, EngineSettings, sends=True)
def extract(
    model: Any,
    corpus: Any = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    reference: Any = None,
    held_out: Any = None,
    keep_scan: bool = True,
    **settings: Any,
) -> "ExtractionReport":
    """How many tries it takes to draw a window of somebody's own text out of the model.

    `model` and `corpus` are as for `tightlip.audit`. `reference` is a model that never saw the text,
    'base' for what an adapter was trained on, which is the default there, or 'none'; `held_out` is
    text of people who were not trained on, for the same figures. Without `out` the report lives as
    long as the object returned. Scans are kept in `scan/` beside the report unless `keep_scan` is
    False, the report is redacted or a model is in memory.
    """
    from tightlip.audit.extraction.extracting import extract_text

    settings |= {"out": out, "tokenizer": tokenizer, "reference": reference}
    settings |= {"held_out": held_out, "keep_scan": keep_scan}
    return _reported(partial(extract_text, model, corpus), "extraction", settings)


@takes(SyntheticConfig, ColumnSettings, ResamplingSettings, sends=True)
def audit_text(
    synthetic: Any,
    corpus: Any,
    *,
    control: Any = None,
    out: str | Path | None = None,
    engine: str = "local",
    **settings: Any,
) -> "TextReport":
    """Which stretches of each person's text stand in generated text, word for word or nearly so.

    `synthetic` is what shall be published: a file or folder with or without a user column, a list
    of texts, or anything that a corpus may be. `corpus` is what it was made from, `control` text of
    people who were not in, by which common phrases are told from copies. No model is needed. Without
    `out` the report lives as long as the object returned.
    """
    from tightlip.audit.synthetic.audit import audit_synthetic

    settings |= {"control": control, "out": out, "engine": engine}
    return _reported(partial(audit_synthetic, synthetic, corpus), "synthetic", settings)


@takes(WeightsConfig)
def weigh(
    prepared: str | Path | PreparedCorpus,
    *,
    device: str = "auto",
    keep_scan: bool = True,
    **settings: Any,
) -> PrivacyWeights:
    """Weigh every training document of a prepared corpus by how rare it is to a public model.

    The weights and their page stand in `weights/` of the corpus' folder, the scans behind them in
    its `scan/` unless `keep_scan` is False.
    """
    from tightlip.report.kit import render_page
    from tightlip.training.weighing import weigh_documents

    render = partial(render_page, "weights")
    return weigh_documents(prepared, render=render, device=device, keep_scan=keep_scan, **settings)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side: `rows` as in comparison.json, and the folder with the files."""

    folder: Path
    rows: "list[Row]"
    matching: Matching
    notes: tuple[str, ...] = ()

    @property
    def page(self) -> Path:
        return self.folder / PAGE


@takes(Matching, ResamplingSettings, ModelSettings, TextSettings, sends=True)
def compare(
    models: Sequence[Any],
    *,
    corpus: Any = None,
    held_out: Any = None,
    key: str | Path | Sequence[str | Path] | None = None,
    reference: str | Path | None = None,
    out: str | Path = "comparison",
    notes: Sequence[str] = (),
    device: str = "auto",
    keep_scan: bool = True,
    **settings: Any,
) -> Comparison:
    """Utility, leakage, cost and promise of several models, and which of them may be compared.

    `models` are runs, folders of other models, and reports that an audit left. `corpus` is the text
    that the other models were trained on, `held_out` text that they were not; by default those of
    the first run. What is not yet measured is measured now and kept in each run's `measures/`, or
    that of `out`, and the scans behind it in `scan/` beside it unless `keep_scan` is False. `key`
    are files of canaries, `reference` a model that never saw the text. `notes` are printed on top of
    the page. With `at_perplexity` a run stands for its first snapshot that is at least as good.

    Holds:
        goes_on: killed and started again, it measures only what is missing.
        silent: what is printed, and the files of the comparison, hold no text and no user's name.
    """
    from tightlip.audit.comparison import compare_models

    kinds = (Matching, ResamplingSettings, ModelSettings, TextSettings)
    matching, resampling, how, columns = split_settings(settings, *kinds)
    measuring: dict[str, Any] = {"key": key, "reference": reference, "device": device, **how.tree()}
    with worked_in(out, "comparison") as out_here, claimed(out_here):
        folder = _free(out_here)
        rows = compare_models(
            *(models, matching, resampling),
            folder=folder,
            corpus=corpus,
            held_out=held_out,
            columns=columns.tree(),
            keep_scan=keep_scan,
            **measuring,
        )
        made = Comparison(folder=folder, rows=rows, matching=matching, notes=tuple(notes))
        _write_comparison(made)
        send(folder, out, "comparison")
        return replace(made, folder=set_aside(folder, out))


def _free(folder: Path) -> Path:
    """`folder`, new, empty or with an earlier comparison; never somebody's other files."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file. Give --out a folder.")
    there = names_in(folder)
    if there and not there & {CSV, JSON, PAGE, MEASURES, SCAN, WORK}:
        raise UsageError(
            f"{folder} holds other files, and a comparison would be mixed among them. Give --out a "
            "new or empty folder."
        )
    return folder


def _write_comparison(made: Comparison) -> None:
    from tightlip.report.comparison.table import csv_text
    from tightlip.report.kit import write_page

    make_private_folder(made.folder)
    about = {"version": tightlip.__version__, **asdict(made.matching), "notes": list(made.notes)}
    write_json(made.folder / JSON, {**about, "runs": made.rows}, alone=True)
    write_text(made.folder / CSV, csv_text(made.rows), alone=True)
    write_page("comparison", made.page, rows=made.rows, **about)


@takes(AttackSettings, EncodingOptions)
def represent_attack(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    again: bool = False,
    device: str = "auto",
    **settings: Any,
) -> "AttackReport":
    """Attack the vectors of one run or several, and write attack.json and report.html.

    The page is in `out`: by default the run's own folder, or `attacks` for several runs. What
    RUN/attack.json already answers is taken from there, unless `again`.
    """
    from tightlip.report.kit import write_page
    from tightlip.vectors.attack_runs import FORMAT, RESULT, attack_runs, result_folder

    version, folder = tightlip.__version__, result_folder(runs, out)
    with claimed(folder):
        report = attack_runs(runs, folder, again=again, device=device, **settings)
        write_json(folder / RESULT, {"format": FORMAT, "version": version, "runs": report.results})
        write_page("vectors", report.page, results=report.results, version=version)
    return report
