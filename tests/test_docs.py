"""Every command and every Python block in the README and docs runs; every name in them exists.

Blocks marked `sh` (that begin with `tightlip `) and `python` run in order, page by page, in a
folder that holds what docs/README.md says. Training is cut to one epoch, and the bundled plays
to a few speeches. `# exits 1` behind a command says how it must end. What two pages prepare or
train in the same words is made once, and each page gets a copy.
"""

import dataclasses
import hashlib
import json
import logging
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer.main
from transformers import GPT2Config, GPT2LMHeadModel

import tightlip
import tightlip.audit.trade_off
import tightlip.corpus.bundled
import tightlip.experiments.adaptive_paper
import tightlip.experiments.adaptive_text
import tightlip.experiments.demo
import tightlip.experiments.vectors
import tightlip.vectors.data
from tightlip.audit.settings import LeakageConfig
from tightlip.cli.main import app, main
from tightlip.core.files import names_in
from tightlip.core.registry import names_of
from tightlip.corpus.bundled import demo_corpus, demo_speeches
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.privacy_weights import WeightsConfig
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.scan.options import ScanOptions
from tightlip.training.config import RunOptions, TrainConfig

ROOT = Path(__file__).parent.parent
# The README may link to pages that describe more; only what is here is checked.
PAGES = [path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if path.exists()]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_EPOCHS = 1


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Command:
    """A line of a page: what to type and how it ends."""

    words: list[str]
    status: int = 0


def blocks_of(text: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in FENCE.finditer(text)]


def commands_in(block: str) -> list[Command]:
    """The `tightlip` lines of a block, a backslash joining two of them."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("tightlip "):
            command, _, remark = line.partition("  # ")
            exits = re.fullmatch(r"exits (\d+)", remark.strip())
            found.append(Command(shlex.split(command)[1:], int(exits[1]) if exits else 0))
    return found


def runnable(page: Path) -> list[tuple[str, str]]:
    return [
        (language, block)
        for language, block in blocks_of(page.read_text(encoding="utf-8"))
        if language == "python" or (language == "sh" and block.startswith("tightlip "))
    ]


def test_a_block_is_read_line_by_line():
    page = (
        "```sh\ntightlip audit m \\\n  --out r  # exits 1\ntightlip demo\n```\n```console\nx\n```\n"
    )
    (language, block), _ = blocks_of(page)
    assert language == "sh"
    assert commands_in(block) == [Command(["audit", "m", "--out", "r"], 1), Command(["demo"])]


# What the commands find


def speeches(num_speakers: int = 12, num_each: int = 6) -> pa.Table:
    """Short speeches of the bundled plays."""
    by_user: dict[str, list[str]] = {}
    for row in demo_corpus().to_pylist():
        if 4 <= len(row["text"].split()) <= 16:
            by_user.setdefault(row["user"], []).append(row["text"])
    chosen = [user for user, texts in by_user.items() if len(texts) >= num_each][:num_speakers]
    rows = [(user, text) for user in chosen for text in by_user[user][:num_each]]
    return pa.table({"user": [user for user, _ in rows], "text": [text for _, text in rows]})


def save_model(folder: Path, corpus: pa.Table, *, steps: int) -> None:
    """A small GPT-2, trained until it knows the corpus by heart, or not at all."""
    tokenizer = build_tokenizer(open_corpus(corpus))
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=64,
        n_layer=1,
        n_head=2,
        n_positions=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(shape)
    texts = [tokenizer.bos_token + " " + text for text in corpus["text"].to_pylist()]
    tokenizer.split_special_tokens = False
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    tokenizer.split_special_tokens = True
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=batch.input_ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def inputs(shared):
    """The folder each page starts from."""
    return shared("inputs-of-docs", write_inputs)


def write_inputs(folder: Path) -> None:
    corpus = speeches()
    pq.write_table(corpus, folder / "corpus.parquet")
    others = speeches(num_speakers=24).slice(corpus.num_rows)
    pq.write_table(others.select(["text"]), folder / "public.parquet")
    pq.write_table(others, folder / "other.parquet")
    pq.write_table(others.slice(0, len(others) // 2), folder / "elsewhere.parquet")
    save_model(folder / "my-model", corpus, steps=40)
    save_model(folder / "public-model", corpus, steps=0)
    shutil.copytree(folder / "my-model", folder / "model-folder")  # the README's name for it


@pytest.fixture
def small(monkeypatch):
    """The bundled plays as a few speeches, and a demo that is over soon."""
    few, some = speeches(), demo_speeches().take(list(range(0, 7000, 10)))
    for module in (tightlip.corpus.bundled, tightlip.experiments.demo):
        monkeypatch.setattr(module, "demo_corpus", lambda: few)
    monkeypatch.setattr(tightlip.vectors.data, "demo_speeches", lambda: some)
    monkeypatch.setattr(tightlip.corpus.bundled, "demo_speeches", lambda: some)
    # Of honest runs dp-check contradicts some; 3 of 100 of those on its page.
    monkeypatch.setattr(tightlip.audit.trade_off, "LEVEL", 1e-6)
    monkeypatch.setattr(tightlip.audit.trade_off, "_SHARE_LEVEL", 1e-8)
    monkeypatch.setitem(tightlip.experiments.demo.TRAIN, "epochs", 1.0)
    monkeypatch.setattr(tightlip.experiments.demo, "FEWEST_WORDS", 1)
    scale, soon = tightlip.experiments.adaptive_paper.SCALES["smoke"], {"steps": 2, "batch_size": 8}
    tiny = {"embedding_size": 8, "hidden_size": 8, "num_layers": 1}
    scale = dataclasses.replace(
        scale,
        shape=scale.shape | tiny,
        plain=scale.plain | soon,
        private=scale.private | soon,
        public=scale.public | tiny | soon,
        vocabulary_size=300,
        repetitions=(1, 2),
        num_carriers=6,
        carrier_repetitions=1,
        noise_multipliers=(1.0,),
    )
    monkeypatch.setitem(tightlip.experiments.adaptive_paper.SCALES, "smoke", scale)
    monkeypatch.setattr(tightlip.experiments.adaptive_text, "IDENTITY", "My ID is {digits:2}")
    scale = tightlip.experiments.vectors.SCALES["smoke"]
    scale = dataclasses.replace(
        scale,
        epsilons=(1.0,),
        dropouts=(),
        attackers=("mlp",),
        training={"epochs": 1, "dimensions": 8},
    )
    monkeypatch.setitem(tightlip.experiments.vectors.SCALES, "smoke", scale)


@pytest.fixture
def same_logging():
    """The command sets up logging; leave it as it was."""
    loggers = [logging.getLogger(name) for name in ("tightlip", "transformers")]
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def shortened(words: list[str]) -> list[str]:
    """The same command with at most one epoch."""
    return [
        str(min(float(word), MOST_EPOCHS)) if before == "--epochs" else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def status_of(words: list[str], monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["tightlip", *shortened(words)])
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def made_from_inputs(words: list[str], inputs: Path, place: Path) -> bool:
    """Whether the command makes a new folder of nothing but what every page starts from."""
    makes = words[0] in ("prepare", "train") or words[:2] == ["represent", "train"]
    there = [word for word in words if (place / word).exists()]
    makes = makes and "--dry-run" not in words
    return makes and all((inputs / word).exists() for word in there)


def made_elsewhere(words: list[str], inputs: Path, shared, monkeypatch) -> Path:
    """What the command makes, in whichever page asked first."""
    at = words.index("--out") + 1
    asked = [*words[: at - 1], *words[at + 1 :]]
    name = "docs-" + hashlib.sha256(json.dumps(shortened(asked)).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        with monkeypatch.context() as moved:
            moved.chdir(inputs)
            status = status_of([*words[:at], str(folder / "out"), *words[at + 1 :]], moved)
        assert status == 0, words

    return shared(name, make) / "out"


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_what_the_page_shows_runs(
    page, inputs, shared, small, same_logging, tmp_path, monkeypatch, capsys
):
    place = shutil.copytree(inputs, tmp_path / "place")
    monkeypatch.chdir(place)
    names: dict = {"__name__": "__docs__"}
    for language, block in runnable(page):
        if language == "python":
            exec(compile(block, name_of(page), "exec"), names)
            continue
        for command in commands_in(block):
            if command.status == 0 and made_from_inputs(command.words, inputs, place):
                made = made_elsewhere(command.words, inputs, shared, monkeypatch)
                shutil.copytree(made, place / command.words[command.words.index("--out") + 1])
                continue
            status = status_of(command.words, monkeypatch)
            said = capsys.readouterr()
            assert status == command.status, f"{command.words}\n{said.out}\n{said.err}"


# What the pages name


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# Those of a group such as `represent` stand below it.
LEAVES = {
    **{(name,): command for name, command in COMMANDS.items() if not hasattr(command, "commands")},
    **{
        (name, below): command
        for name, group in COMMANDS.items()
        for below, command in getattr(group, "commands", {}).items()
    },
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
NOT_OURS = {"--help"}


@cache
def flags_of(command: click.Command) -> set[str]:
    """Every flag of a command; of `train` with those of every mitigation."""
    asked = [[]]
    if command is LEAVES["train",]:
        asked += [["--mitigation", name] for name in names_of("mitigation")]
    params = [param for args in asked for param in command.imported(args).params]
    return {flag for param in params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_and_command_on_the_page_exists(page):
    text = page.read_text(encoding="utf-8")
    every = {flag for command in LEAVES.values() for flag in flags_of(command)} | {"--version"}
    every |= {
        "--nproc-per-node",
        "--head",
        "--port",
        "--node-ip-address",
        "--generate",
    }  # torchrun's, and Ray's
    assert set(FLAG.findall(text)) - every == set()
    in_code = [block for _, block in blocks_of(text)]
    in_code += re.findall(r"`(tightlip [^`\n]+)`", FENCE.sub("", text))
    for line in "\n".join(in_code).replace("\\\n", " ").splitlines():
        words = line.split()
        if not line.startswith("tightlip ") or words[1].startswith("-"):
            continue
        command = LEAVES.get((words[1],)) or LEAVES.get(tuple(words[1:3]))
        assert command is not None, line
        assert set(FLAG.findall(line)) <= flags_of(command), line


def slugs(page: Path) -> set[str]:
    """The anchors GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in slugs(target), f"{name_of(page)} links to {link}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        place = str(page.relative_to(ROOT / "docs"))
        # Benchmarks are linked from the README.
        if place not in ("README.md", "benchmarks.md"):
            assert f"({place})" in index, place


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_page_is_well_formed(page):
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert text.count("\n```") % 2 == 0, "a fence is open"
    for table in re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text), re.M):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1, table


# What docs/formats.md says of a report


def section(heading: str, page: str = "formats.md") -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    return found


def first_column(table: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", table, re.M)


@pytest.fixture(scope="module")
def report(inputs, tmp_path_factory):
    return tightlip.audit(
        inputs / "my-model",
        inputs / "corpus.parquet",
        out=tmp_path_factory.mktemp("report") / "r",
        public_model=inputs / "public-model",
    )


def test_every_key_of_a_summary_is_documented_and_no_other(report):
    written = json.loads((report.folder / "summary.json").read_text(encoding="utf-8"))
    assert first_column(section("summary.json")) == list(
        dict.fromkeys(first_column(section("summary.json")))
    )
    assert set(first_column(section("summary.json"))) == set(written)


@pytest.mark.parametrize("name", ["sequences", "users"])
def test_every_column_is_documented_with_its_type(report, name):
    schema = pq.read_schema(report.folder / f"{name}.parquet")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section(f"{name}.parquet"), re.M)
    spelled = {"double": "float64"}
    real = [
        (
            field.name,
            f"list<{spelled.get(str(field.type.value_type), field.type.value_type)}>"
            if pa.types.is_list(field.type)
            else spelled.get(str(field.type), str(field.type)),
        )
        for field in schema
    ]
    assert [(column, kind.replace("\\", "")) for column, kind in rows] == real


def test_the_report_has_the_files_it_is_said_to_have(report):
    named = set(re.findall(r"^\| `([\w.]+)`", section("A report"), re.M))
    assert names_in(report.folder) <= named


def test_every_setting_of_training_is_in_the_table():
    table = section("Settings", "training.md")
    for field in [*dataclasses.fields(TrainConfig), *dataclasses.fields(RunOptions)]:
        assert f"`{field.name}`" in table, field.name


def test_every_choice_has_a_flag_of_its_name():
    """Flags mirror the names of the settings, so that one page can speak of both."""
    pairs = [
        (PrepareConfig, COMMANDS["prepare"], set()),
        (WeightsConfig, COMMANDS["prepare"], set()),
        (TrainConfig, COMMANDS["train"], set()),
        (RunOptions, COMMANDS["train"], {"checkpoint_seconds"}),
        (LeakageConfig, COMMANDS["audit"], {"thresholds"}),
        (ScanOptions, COMMANDS["audit"], set()),
    ]
    for settings, command, in_file_only in pairs:
        for name in {field.name for field in dataclasses.fields(settings)} - in_file_only:
            assert f"--{name.replace('_', '-')}" in flags_of(command), name
