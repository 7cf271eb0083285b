"""What an audit would take: audits of a few documents in a temporary folder, and the rest in proportion."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tightlip.audit.leakage.audit import LEAVE_OUT, leakage_subject
from tightlip.audit.leakage.findings import checkpoints_of
from tightlip.audit.leakage.spill import RUN_BYTES, SEQUENCE_BYTES
from tightlip.audit.leakage.summary import LeakageReport
from tightlip.audit.settings import LeakageConfig
from tightlip.core import progress
from tightlip.core.children import ALONE_SECONDS, CHILD_BYTES
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.core.settings import bytes_from, names_in, split_settings
from tightlip.core.stores import place_of, work_folder
from tightlip.corpus.opening import CorpusSource
from tightlip.corpus.prepare_config import ColumnSettings, TextSettings
from tightlip.corpus.readers import row_size
from tightlip.scan.models import open_model
from tightlip.scan.options import ScanOptions
from tightlip.scan.store import SCAN, SHARD_TOKENS

MOST_ROWS = 5_000  # held of a corpus, drawn evenly
FIRST_CHARACTERS, RATE_CHARACTERS = 8_000, 60_000  # of the first two trials
MOST_CHARACTERS = 4 * SHARD_TOKENS  # of the last: about one shard of the scan
ENOUGH_SECONDS = 10.0  # for the last trial
COUNTING_BYTES = 27  # of a token while its shard is counted
SCAN_BYTES = 8  # a token's rank and log-probability
WORK_BYTES = 8  # its number and its word's, while an audit runs
DOCUMENT_BYTES, USER_BYTES = 40, 150  # held in memory of each
OF_A_RUN = (
    "leave-out trains the run again without the owners of what leaked; that is not counted here."
)
OF_A_CLUSTER = (
    "Scanning is taken to be shared by as many workers as it has shards, the reading of words by all and tokenising by all "
    "machines, each as fast as this one; counting and the rest to take as long as here."
)
WORKER_SECONDS = 7.0  # assumed: what a process takes to import all that an audit needs
CLUSTER = "Starting workers"
REST = "Everything else"
TOKENISING, READING = "Tokenising", "Reading words"  # what an engine's map_python does


@dataclass(frozen=True, kw_only=True)
class Text:
    """What one pass over a corpus tells, and rows drawn evenly from it."""

    num_documents: int
    num_users: int
    num_characters: int
    longest: int
    rows: list[dict[str, Any]]
    seconds: float

    def some(self, num_characters: float) -> list[dict[str, Any]]:
        """About so many characters of rows, of short and long ones alike as the corpus has them."""
        rows = sorted(self.rows, key=row_size)
        share = num_characters / max(1, sum(map(row_size, rows)))
        number = min(len(rows), max(1, round(share * len(rows))))
        return [rows[(2 * place + 1) * len(rows) // (2 * number)] for place in range(number)]


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """An audit of some rows: their characters, its stages in seconds, what it found and wrote."""

    num_characters: int
    stages: dict[str, float]
    summary: dict[str, Any]
    written: int


def read_text(source: CorpusSource, description: str) -> Text:
    """One pass over all rows; the same rows are drawn each time."""
    user_column = "user" if source.prepared() else source.columns.get("user_column") or "user"
    draw, rows, users = Random(0), list[dict[str, Any]](), set[Any]()
    number = characters = longest = 0
    next(source.documents().rows(), None)  # what is imported for the first row is paid once
    start = time.perf_counter()
    with progress.task(description, None) as bar:
        for number, row in enumerate(source.documents().rows(), 1):
            size, whose = row_size(row), row.get(user_column)
            users.update(whose if isinstance(whose, list) else [whose])
            characters, longest = characters + size, max(longest, size)
            if len(rows) < MOST_ROWS:
                rows.append(row)
            elif (place := draw.randrange(number)) < MOST_ROWS:
                rows[place] = row
            bar.advance()
    return Text(
        num_documents=number,
        num_users=len(users),
        num_characters=characters,
        longest=longest,
        rows=rows,
        seconds=time.perf_counter() - start,
    )


def estimate(
    model: Any,
    corpus: Any = None,
    *,
    audit: Callable[..., LeakageReport],
    out: str | Path | None = None,
    tokenizer: Any = None,
    public_model: Any = None,
    validation: Any = None,
    snapshots: bool = False,
    keep_scan: bool = True,
    **settings: Any,
) -> progress.Estimate:
    """What `audit` would take with these arguments.

    Three audits of rows drawn from the corpus are timed: a first one, which pays for what any audit
    pays once; a small one; and one of about ten seconds. Each stage is taken to be a fixed part, as in
    the first, and a part in proportion to the text, by the other two.
    """
    # As the audit itself has it: where it cannot send its report, and what it leaves out of one.
    folder = work_folder(out, "leakage") or Path()
    settings = settings if place_of(out) is None else {"redact": True, **settings}
    kinds = (LeakageConfig, ScanOptions, TextSettings, EngineSettings)
    config, options, columns, where = split_settings(settings, *kinds)
    # Of where it runs only the threads are tried: that is on this machine, whatever was asked for.
    elsewhere = {*names_in(EngineSettings)} - {"threads_per_worker"}
    settings = {name: each for name, each in settings.items() if name not in elsewhere}
    checkpoints = checkpoints_of(model) if snapshots else []
    latest = checkpoints[-1].folder if checkpoints else model
    subject = leakage_subject(latest, corpus, validation, tokenizer, columns.tree())
    opened = open_model(subject.model, options)
    opened.refuse_unused_base()
    source, beside = subject.members, subject.held_out
    assert source is not None
    text = read_text(source, "Reading the corpus")
    held_out = None if beside is None else read_text(beside, "Reading held-out text")
    leaves_out = isinstance(public_model, str) and public_model == LEAVE_OUT
    if stored := source.prepared():
        if stored.roles is not None:
            raise UsageError(
                "--dry-run takes some rows of a corpus, and of chats that are prepared only tokens are left. Give the corpus they "
                "were prepared from."
            )
        settings = {n: v for n, v in settings.items() if n not in names_in(ColumnSettings)}

    def tried(num_characters: float) -> _Trial:
        share = num_characters / max(1, text.num_characters)
        rows = text.some(num_characters)
        others = None if held_out is None else held_out.some(share * held_out.num_characters)
        given = {"public_model": "none" if leaves_out else public_model, "snapshots": snapshots}
        given |= {"tokenizer": tokenizer, "validation": others}
        start = time.perf_counter()
        with (
            TemporaryDirectory(prefix="tightlip-") as folder,
            progress.unseen(),
            progress.timed_tasks() as seconds,
        ):
            made = audit(model, rows, out=Path(folder) / "audit", **given, **settings)
            rest = time.perf_counter() - start - sum(seconds.values())
            scanned = progress.size_of(made.folder / SCAN)
            written, summary = progress.size_of(made.folder) - scanned, made.summary
        size = sum(map(row_size, rows))
        stages = {**seconds, REST: rest}
        return _Trial(num_characters=size, stages=stages, summary=summary, written=written)

    with progress.task("Trying some of it", 3) as bar:
        first = tried(FIRST_CHARACTERS)
        bar.advance()
        small = tried(RATE_CHARACTERS)
        bar.advance()
        took = sum(seconds for name, seconds in small.stages.items() if name != REST)
        rate = small.num_characters / max(took, 1e-3)
        last = tried(min(MOST_CHARACTERS, max(2 * RATE_CHARACTERS, ENOUGH_SECONDS * rate)))
    factor = text.num_characters / last.num_characters
    num_tokens = round(factor * last.summary["num_tokens"])
    # Stored tokens are read as they are; the text itself is read twice, by its words.
    reading = {"Reading": (2 if stored is not None else 3) * text.seconds}
    stages, once = (_extrapolated(first, small, last, size) for size in (text.num_characters, 0))
    stages = reading | stages
    if stored is not None:
        num_tokens = stored.num_tokens
        stages.pop(TOKENISING, None)
    num_shards = max(1, num_tokens // SHARD_TOKENS)
    stages, num_machines, children = _shared_out(stages, once, num_shards, where, options.device)
    runs_bytes = RUN_BYTES * factor * last.summary["sequences_in_s"]
    # Those that outgrow memory are kept on disk, but for the sequences' order.
    is_spilt = runs_bytes > bytes_from(options.memory)
    order_bytes = SEQUENCE_BYTES * factor * last.summary["distinct_sequences"]
    counting = min(bytes_from(options.memory), COUNTING_BYTES * num_tokens)
    held = DOCUMENT_BYTES * text.num_documents + USER_BYTES * text.num_users + 4 * num_tokens
    is_kept = keep_scan and not config.redact and opened.is_file
    others = 0 if held_out is None else held_out.num_characters
    others_tokens = round(num_tokens * others / max(1, text.num_characters))
    scan_bytes = SCAN_BYTES * (num_tokens + others_tokens)
    share = last.num_characters / max(1, text.num_characters)
    known = "Tokens are counted" if stored is not None else "The number of tokens is estimated"
    passing = WORK_BYTES * num_tokens + round(runs_bytes if is_spilt else 0)
    return progress.Estimate(
        corpus={
            "documents": text.num_documents,
            "users": text.num_users,
            "characters": text.num_characters,
            "longest_document": text.longest,
            "tokens": num_tokens,
        },
        stages=stages,
        memory_bytes=round(
            progress.most_memory()
            + counting
            + (order_bytes if is_spilt else runs_bytes)
            + held
            + children * CHILD_BYTES
        ),
        gpu_memory_bytes=progress.most_gpu_memory(opened.device.replace("mapped", "cuda")),
        disk_bytes=round(max(1, factor) * last.written) + (scan_bytes if is_kept else 0),
        passing_disk_bytes=passing + (0 if is_kept else scan_bytes),
        free_disk_bytes=progress.free_disk(folder),
        machines=num_machines,
        notes=[
            f"{known}; seconds are those of {share:.2%} of the text, in proportion. What leaks of the rest is not known yet: the "
            "tables' size is an upper estimate.",
            *([OF_A_RUN] if leaves_out else []),
            *([OF_A_CLUSTER] if where.engine != "local" else []),
        ],
    )


def _extrapolated(first: _Trial, small: _Trial, last: _Trial, whole: int) -> dict[str, float]:
    """Seconds of each stage over `whole` characters: what it takes once, and in proportion."""
    stages = {}
    for name in last.stages:
        once, less, more = (trial.stages.get(name, 0.0) for trial in (first, small, last))
        size = last.num_characters
        slope = more / size
        if size > 2 * small.num_characters:
            slope = min(slope, max(0.0, (more - less) / (size - small.num_characters)))
        stages[name] = max(0.0, once - slope * first.num_characters) + slope * whole
    return stages


def _shared_out(
    stages: dict[str, float],
    once: dict[str, float],
    num_shards: int,
    where: EngineSettings,
    device: str,
) -> tuple[dict[str, float], int, int]:
    """The stages where workers do them at the same time, the number of machines, and of processes
    beside this one. What a scan takes `once`, to open the model say, each worker takes."""
    start = time.perf_counter()
    with where.opened(device) as engine:
        is_cluster = engine.is_remote
        num_machines = engine.num_machines if is_cluster else 1
        shared = {CLUSTER: time.perf_counter() - start + WORKER_SECONDS} if is_cluster else {}
        for name, seconds in stages.items():
            alone, num = once.get(name, 0.0), 1
            if name == READING:
                alone, num = alone + (0.0 if is_cluster else ALONE_SECONDS), engine.num_python
            elif name == TOKENISING:  # the trials' tokenizer had all cores of this machine
                num = num_machines
            elif name.startswith("Scanning") and is_cluster:
                num = min(engine.num_workers, num_shards)
            alone = min(alone, seconds)
            shared[name] = alone + (seconds - alone) / num
        in_python = max(stages.get(name, 0.0) for name in (READING, TOKENISING))
        takes_children = not is_cluster and engine.num_python > 1 and in_python > ALONE_SECONDS
        return shared, num_machines, engine.num_python if takes_children else 0
