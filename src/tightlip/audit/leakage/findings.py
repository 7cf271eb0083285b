"""The training data leakage report: which text the model completes, and whose it is.

Scan every document once, collect the correct runs, count each in the corpus, compare with a
public model, write the report. METHODS: Inan et al., "Privacy Analysis in Language Models via
Training Data Leakage Report".
"""

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tightlip.audit.leakage.leaks import Fit, Leaks, fit_of
from tightlip.audit.leakage.summary import Findings, summary_of
from tightlip.audit.leakage.tables import ratio_of_sequence, write_sequences, write_users
from tightlip.core import files
from tightlip.core.errors import DamagedError, LostWorkersError, UsageError
from tightlip.core.run_folder import SNAPSHOTS, Snapshot, is_run, is_snapshot_name
from tightlip.corpus.encoding import special_ids
from tightlip.corpus.opening import CorpusSource, tokenised_for
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models.folders import checkpoints_in
from tightlip.scan.models import OpenedModel
from tightlip.scan.scans import Scans
from tightlip.scan.store import SCAN, remove_scans

WORK = ".work"  # tokens, and what is not to be kept, while an audit is under way
REDACTED = ".redacted"  # nothing with text was ever written where this stands
TABLES = ("sequences.parquet", "owners.parquet", "users.parquet")
REPORT_NAMES = {
    *(*TABLES, "summary.json", "report.html", "snapshots.json", "log.txt"),
    *("membership.json", "groups.json"),
    *(SNAPSHOTS, SCAN, WORK, REDACTED),
}
ONLY_TOKENS = (
    "The rows are tokens, so who wrote a sequence was counted by its tokens only; others may have written the same text cut "
    "differently."
)
_SAMPLED_PERPLEXITIES = 2000


def write_report(folder: Path, findings: Findings) -> dict[str, Any]:
    """Write the tables, then summary.json, whose presence says the report is whole."""
    (folder / "summary.json").unlink(missing_ok=True)
    leaks, by_text = findings.leaks, findings.by_text
    config, public = findings.config, findings.public
    ratios = ratio_of_sequence(leaks, public)
    decode = decoder_of(findings.model.tokenizer)
    write_sequences(folder, leaks, by_text, ratios, public, decode, config)
    write_users(folder, leaks, by_text, ratios, config.redact)
    summary = summary_of(findings, ratios)
    files.write_json(folder / "summary.json", summary)
    return summary


def validation_fit(
    text: CorpusSource, model: OpenedModel, scans: Scans, tokens: Path, top_k: int
) -> Fit:
    """Perplexity and top-k accuracy on text the model was not trained on, its tokens in `tokens`."""
    corpus = tokenised_for(text, model.tokenizer, tokens, engine=scans.engine)
    scanned = scans.scan(model, corpus, "Scanning validation text")
    return fit_of(scanned, top_k, tokens_with_text(model.tokenizer, corpus))


def decoder_of(tokenizer: Any) -> Callable[[list[list[int]]], list[str]]:
    """The tokenizer's decoding of many id lists at once."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # Twice as fast as batch_decode, which adds only the clean-up that is off here.
        return lambda rows: backend.decode_batch(rows, skip_special_tokens=False)
    return lambda rows: [tokenizer.decode(row) for row in rows]


def tokens_with_text(tokenizer: Any, corpus: TokenizedCorpus) -> np.ndarray:
    """Which ids carry text: not unknown, padding, begin, end or any other special token."""
    size = max(len(tokenizer), int(corpus.tokens.max(initial=0)) + 1)
    carries = np.ones(size, dtype=bool)
    carries[[number for number in special_ids(tokenizer) if number < size]] = False
    used = np.unique(corpus.tokens)
    for number, token in zip(used, tokenizer.convert_ids_to_tokens(used.tolist()), strict=True):
        if token == "":
            carries[number] = False
    if corpus.num_tokens and not carries[used].any():
        raise UsageError(
            f"The tokenizer knows none of the corpus' words: all {corpus.num_tokens:,} tokens are "
            f"unknown or special, so nothing could be found whatever the model knows. Give the "
            f"corpus the model was trained on, or the tokenizer that belongs to it."
        )
    return carries


def unknown_share(tokenizer: Any, corpus: TokenizedCorpus) -> float:
    """The share of the corpus that the tokenizer has no word for."""
    if tokenizer.unk_token_id is None or not corpus.num_tokens:
        return 0.0
    return float((corpus.tokens == tokenizer.unk_token_id).mean())


# What is audited
def checkpoints_of(model: Any) -> list[Snapshot]:
    """What transformers' Trainer left of its training, as snapshots."""
    if not isinstance(model, str | Path) or is_run(Path(model)):
        return []
    steps = {int(path.name.partition("-")[2]): path for path in checkpoints_in(Path(model))}
    return [
        Snapshot(name=f"step-{step}", step=step, epoch=_epoch_at(path), folder=path)
        for step, path in steps.items()
    ]


def _epoch_at(checkpoint: Path) -> float:
    state = checkpoint / "trainer_state.json"
    epoch = files.read_json(state).get("epoch") if state.is_file() else None
    return float(epoch) if isinstance(epoch, int | float) else 0.0


# Where a report stands
def folder_for(out: str | Path | None) -> tuple[Path, TemporaryDirectory[str] | None]:
    """The folder asked for; without one a temporary one, and what it lives as long as."""
    keep_alive = TemporaryDirectory(prefix="tightlip-") if out is None else None
    return Path(keep_alive.name if keep_alive else str(out)), keep_alive


def report_folder(
    folder: Path, *, redact: bool = False, names: Collection[str] = REPORT_NAMES
) -> Path:
    """`folder`, new, empty or holding an earlier report, of which `names` are; never somebody's
    other files, and for a redacted report never one that held text."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file. Give --out a folder.")
    there = files.names_in(folder)
    if there - set(names):
        raise UsageError(
            f"{folder} holds other files, and a report would be mixed among them. "
            f"Give --out a new or empty folder."
        )
    if there and redact != _is_redacted(folder):
        held, other = ("text", "a redacted one") if redact else ("no text", "one with text")
        raise UsageError(
            f"{folder} holds a report with {held}, and {other} is not written over it: what is left of the one must not "
            "be handed on as the other. Give a new --out, or empty that folder first."
        )
    if redact:
        files.write_text(folder / REDACTED, "")  # first: a killed one is known by it
    return files.make_private_folder(folder)


def _is_redacted(folder: Path) -> bool:
    """Whether nothing but redacted reports was ever written here; 0.1 said it in the summary."""
    try:
        is_marked = (folder / REDACTED).exists()
        return is_marked or bool(files.read_json(folder / "summary.json")["redacted"])
    except (OSError, DamagedError, KeyError, TypeError):
        return False


def remove_snapshots(folder: Path, *, but: Collection[str] = ()) -> None:
    """Take away an earlier report's snapshots, and nothing else that may stand there."""
    place = folder / SNAPSHOTS
    for path in place.iterdir() if place.is_dir() and not place.is_symlink() else ():
        if is_snapshot_name(path.name) and path.name not in but and not path.is_symlink():
            shutil.rmtree(path)
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()


@contextmanager
def writing_report(
    folder: Path,
    write_page: Callable[[Path], object],
    *,
    redact: bool,
    names: Collection[str] = REPORT_NAMES,
    keeps_scan: bool = False,
) -> Iterator[None]:
    """Inside the figures are written, then the page. Of a refused report no work is left, and no
    folder if nothing else is there."""
    with files.claimed(folder):
        had_scan = (report_folder(folder, redact=redact, names=names) / SCAN).exists()
        try:
            yield
            write_page(folder)
        except LostWorkersError:
            raise
        except UsageError:
            shutil.rmtree(folder / WORK, ignore_errors=True)
            if not had_scan:
                remove_scans(folder / SCAN)
            if not files.names_in(folder) - {REDACTED}:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        # Only now: until the report is whole, the scan is what a killed one goes on from.
        shutil.rmtree(folder / WORK, ignore_errors=True)
        if not keeps_scan:
            remove_scans(folder / SCAN)  # of an earlier report


def notes_on(model: OpenedModel, leaks: Leaks, skipped: int) -> list[str]:
    """Plain sentences that a reader of the figures should know."""
    notes = []
    if skipped:
        notes.append(f"{skipped:,} unusable rows of the corpus were skipped and are not counted.")
    if leaks.corpus.owners is not None:
        notes.append(
            "Texts have several owners here. What one person wrote is what stands in texts of theirs alone, "
            "and it belongs to everybody who owns all of these."
        )
    unknown = unknown_share(model.tokenizer, leaks.corpus)
    if unknown > 0.2:
        notes.append(
            f"{unknown:.0%} of the corpus' tokens are unknown to the tokenizer; what they stand for "
            f"cannot be found."
        )
    if not model.tokenizer.is_fast:
        notes.append(
            "The tokenizer cannot say which characters a token covers, so who wrote a sequence was "
            "counted by its tokens only; others may have written the same text cut differently."
        )
    if model.begin_id is None and not leaks.corpus.begins_itself:
        notes.append(
            "No begin token stands before a text, so the first token of each document is not scored."
        )
    return notes


def sampled_perplexities(leaks: Leaks) -> list[float]:
    """The lowest perplexity of each unique sequence, at most 2,000 of them, evenly chosen."""
    lowest = leaks.over_runs(np.minimum, np.inf, leaks.perplexity_of_run.__getitem__)
    values = np.sort(lowest[leaks.unique])
    values = values[np.isfinite(values)]
    step = max(1, -(-len(values) // _SAMPLED_PERPLEXITIES))
    return [float(value) for value in values[::step]]


def best_validation(rows: list[dict[str, Any]]) -> str | None:
    """The snapshot at which training should have stopped."""
    known = [row for row in rows if row["validation_perplexity"] is not None]
    return min(known, key=lambda row: row["validation_perplexity"])["name"] if known else None
