"""Every command of tightlip with small inputs, so that each is put through the same faults.

A command that is in the CLI and not in CASES fails `test_every_command_is_examined`.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import tightlip
from animals import WORDS
from cli.held_out_runs import documents
from tightlip.corpus.canaries import Canary, Planted, write_canary_key

SMALL = ("--hidden-size", "8", "--embedding-size", "8", "--num-layers", "1", "--epochs", "1")
FEW = ("--num-bootstraps", "100", "--device", "cpu")
VECTORS = ("--label", "team", "--private", "kind", "--extractor", "bag", "--epochs", "1")


@dataclass(frozen=True)
class Case:
    """A command line in a folder that `write_place` made; `writes` are what it writes to."""

    arguments: tuple[str, ...]
    writes: tuple[str, ...] = ()


CASES = {
    "demo": Case(("demo", "--out", "out"), ("out",)),
    "prepare": Case(("prepare", "corpus.parquet", "--out", "out"), ("out",)),
    "train": Case(("train", "corpus.parquet", "--out", "out", *SMALL), ("out",)),
    "audit": Case(("audit", "run", "--out", "out"), ("out",)),
    "extract": Case(("extract", "run", "--out", "out", "--lengths", "2,5"), ("out",)),
    "audit-text": Case(
        ("audit-text", "corpus.parquet", "corpus.parquet", "--out", "out", *FEW[:2]), ("out",)
    ),
    "membership": Case(("membership", "run", *FEW), ("run",)),
    "groups": Case(("groups", "run", *FEW), ("run",)),
    "dp-check": Case(("dp-check", "checked"), ("checked",)),
    "tab": Case(("tab", "run", "--prompt", "ant bee")),
    "compare": Case(("compare", "run", "checked", "--out", "out", *FEW), ("out", "run")),
    "ledger": Case(("ledger", "checked")),
    "reproduce": Case(("reproduce", "adaptive", "--out", "out"), ("out",)),
    "canaries plant": Case(("canaries", "plant", "corpus.parquet", "--out", "out"), ("out",)),
    "canaries choose": Case(
        ("canaries", "choose", "run", "--out", "out.json"), ("run", "out.json")
    ),
    "canaries measure": Case(
        ("canaries", "measure", "run", "--key", "key.json", "--out", "out.json"), ("out.json",)
    ),
    "represent train": Case(
        ("represent", "train", "corpus.parquet", "--out", "out", "--epsilon", "9", *VECTORS),
        ("out",),
    ),
    "represent export": Case(
        ("represent", "export", "vectors/device", "--onnx"), ("vectors/device/device.onnx",)
    ),
    "represent encode": Case(
        ("represent", "encode", "vectors/device", "corpus.parquet", "--out", "out.parquet"),
        ("out.parquet",),
    ),
    "represent classify": Case(
        ("represent", "classify", "vectors/server", "sent.parquet", "--out", "out.csv"),
        ("out.csv",),
    ),
    "represent guarantee": Case(("represent", "guarantee", "--dimensions", "8", "--epsilon", "4")),
    "represent attack": Case(
        ("represent", "attack", "vectors", "--attackers", "logistic", "--num-bootstraps", "100"),
        ("vectors",),
    ),
}


def write_place(folder: Path) -> None:
    """A corpus, runs on it with and without privacy, a key, and a run of private vectors."""
    rows = [row | {"kind": "odd" if n % 2 else "even"} for n, row in enumerate(documents())]
    pq.write_table(pa.Table.from_pylist(rows), folder / "corpus.parquet")
    small = {"hidden_size": 8, "embedding_size": 8, "num_layers": 1, "epochs": 1}
    tightlip.train(folder / "corpus.parquet", folder / "run", **small)
    public = folder / "public-words"
    shutil.copytree(folder / "run/corpus/tokenizer", public)
    tightlip.train(
        folder / "corpus.parquet",
        folder / "checked",
        mitigation="dp",
        epsilon=8,
        unit="example",
        dp_check_canaries=20,
        allow_unproved=True,
        **small,
    )
    canaries = [
        Canary(text=row["text"], user=row["user"], repetitions=1, template="{words:8}",
               values=tuple(row["text"].split()))
        for row in rows[:4]
    ]  # fmt: skip
    write_canary_key(folder / "key.json", Planted(canaries=canaries, pools={"words": WORDS}))
    tightlip.represent_train(
        folder / "corpus.parquet", folder / "vectors", label="team", private=("kind",),
        extractor="bag", epochs=1, epsilon=9.0,
    )  # fmt: skip
    tightlip.represent_encode(
        folder / "vectors/device", folder / "corpus.parquet", out=folder / "sent.parquet"
    )
