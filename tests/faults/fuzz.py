"""Every reader given damaged files without end: nothing but a refusal of ours may come out.

    python tests/faults/fuzz.py            until interrupted (`make fuzz`)
    python tests/faults/fuzz.py --examples 3 [--only READER]

A failure prints the reader, the error and the edits, which `--replay READER EDITS` makes again.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from faults.cases import write_place
from tightlip.audit.leakage.audit import open_report
from tightlip.commands import audit
from tightlip.core.checksums import LIST
from tightlip.core.errors import TightlipError
from tightlip.core.run_folder import open_run
from tightlip.corpus.canaries import read_canary_key, read_check_key
from tightlip.corpus.opening import open_run_corpus
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.readers import open_corpus
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.privacy.ledger import read_ledger
from tightlip.report.leakage import read_users
from tightlip.report.leakage.tallies import tally_and_choose
from tightlip.vectors.data import load_examples
from tightlip.vectors.encode import load_device, represent_encode
from tightlip.vectors.server import load_server, read_vectors


@dataclass(frozen=True)
class Reader:
    """A file of the place, and what reads it."""

    file: str
    read: Callable[[Path], object]  # of the place


def _rows(name: str) -> Reader:
    return Reader(name, lambda place: [*open_corpus(place / name).batches()])


def _whole_run(place: Path) -> object:
    return open_run_corpus(open_run(place / "run")).train.document(0)


READERS = {
    **{f"corpus {kind}": _rows(f"corpus.{kind}") for kind in ("csv", "jsonl", "parquet", "arrow")},
    "config.toml": Reader("run/config.toml", _whole_run),
    "metrics.jsonl": Reader("run/metrics.jsonl", lambda place: open_run(place / "run")),
    "ledger.json": Reader("run/ledger.json", lambda place: open_run(place / "run")),
    "private ledger": Reader(
        "checked/ledger.json", lambda place: read_ledger(place / "checked/ledger.json")
    ),
    "prepared.json": Reader(
        "run/corpus/prepared.json", lambda place: open_prepared(place / "run/corpus")
    ),
    "tokens": Reader("run/corpus/train/tokens.npy", _whole_run),
    "bounds": Reader("run/corpus/train/bounds.npy", _whole_run),
    "users": Reader("run/corpus/train/users.npy", _whole_run),
    "tokens info": Reader("run/corpus/train/info.json", _whole_run),
    "key.json": Reader("key.json", lambda place: read_canary_key(place / "key.json")),
    "dp_check.json": Reader(
        "checked/dp_check.json", lambda place: read_check_key(place / "checked/dp_check.json")
    ),
    "config.json": Reader(
        "run/model/config.json", lambda place: load_causal_lm(place / "run/model")
    ),
    "weights": Reader(
        "run/model/model.safetensors", lambda place: load_causal_lm(place / "run/model")
    ),
    "tokenizer.json": Reader(
        "run/model/tokenizer.json", lambda place: load_tokenizer(place / "run/model")
    ),
    "tokenizer_config.json": Reader(
        "run/model/tokenizer_config.json", lambda place: load_tokenizer(place / "run/model")
    ),
    "device.json": Reader(
        "vectors/device/device.json", lambda place: load_device(place / "vectors/device")
    ),
    "guarantee.json": Reader(
        "vectors/device/guarantee.json",
        lambda place: represent_encode(place / "vectors/device", ["ant bee"]),
    ),
    "extractor": Reader(
        "vectors/device/extractor/model.safetensors",
        lambda place: load_device(place / "vectors/device"),
    ),
    "server.json": Reader(
        "vectors/server/server.json", lambda place: load_server(place / "vectors/server")
    ),
    "split.parquet": Reader(
        "vectors/split.parquet", lambda place: load_examples(place / "vectors")
    ),
    "sent.parquet": Reader("sent.parquet", lambda place: read_vectors(place / "sent.parquet")),
    "scan shards": Reader("report/scan/*/*.npz", lambda place: _audit_again(place)),
    "scan key": Reader("report/scan/*/key.json", lambda place: _audit_again(place)),
    "summary.json": Reader("report/summary.json", lambda place: open_report(place / "report")),
    "sequences.parquet": Reader(
        "report/sequences.parquet", lambda place: tally_and_choose(place / "report", [])
    ),
    "users.parquet": Reader("report/users.parquet", lambda place: read_users(place / "report")),
}


def _audit_again(place: Path) -> object:
    return audit(place / "run", out=place / "report")


def add_what_is_read(place: Path) -> None:
    """To the place of the other faults: the corpus in every format, and a report."""
    table = pq.read_table(place / "corpus.parquet")
    pyarrow.csv.write_csv(table, place / "corpus.csv")
    lines = [json.dumps(row) for row in table.to_pylist()]
    (place / "corpus.jsonl").write_text("\n".join(lines))
    with pa.ipc.new_file(place / "corpus.arrow", table.schema) as stream:
        stream.write_table(table)
    _audit_again(place)


# An edit: where, as a share of the file, and what: bytes put in their place, or the end cut off.
Edits = list[tuple[float, str | None]]
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.one_of(st.none(), st.binary(min_size=1, max_size=8).map(bytes.hex),
                  st.sampled_from([text.encode().hex() for text in
                                   ("null", "-1", "1e999", "[]", "{}", '""', "\n", ",", "9" * 30)])),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


def edited(content: bytes, edits: Edits) -> bytes:
    for share, put in edits:
        place = int(share * len(content))
        end = b"" if put is None else bytes.fromhex(put) + content[place + len(put) // 2 :]
        content = content[:place] + end
    return content


def tried(name: str, edits: Edits, place: Path) -> None:
    """Edit the reader's file in the place, read it, and put it back."""
    reader = READERS[name]
    path = sorted(place.glob(reader.file))[0]
    for listed in [*place.rglob(LIST)]:
        listed.unlink()  # or it would be refused before anything was read
    plain = path.read_bytes()
    path.write_bytes(edited(plain, edits))
    try:
        reader.read(place)
    except TightlipError:
        pass
    finally:
        path.write_bytes(plain)


def failures(name: str, place: Path, *, examples: int, number: int) -> Iterator[str]:
    """What a reader lets out other than a refusal, with the edits that show it."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # few edits are drawn anyway, and some readers are slow
        report_multiple_bugs=False,
    )
    @given(EDITS)
    def fuzz(edits: Edits) -> None:
        try:
            tried(name, edits, place)
        except Exception as error:
            error.edits = edits  # type: ignore[attr-defined]
            raise

    try:
        fuzz()
    except Exception as error:
        yield _told(name, error)


def _told(name: str, error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    edits = json.dumps(getattr(error, "edits", None))
    return (
        f"{name}: {type(error).__name__}: {str(error)[:150]} ({Path(where.filename).name}:{where.lineno})\n"
        f"  python tests/faults/fuzz.py --replay {shlex.quote(name)} {shlex.quote(edits)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, help="of each reader; by default without end")
    parser.add_argument("--only", choices=READERS)
    parser.add_argument("--replay", nargs=2, metavar=("READER", "EDITS"))
    parser.add_argument("--place", type=Path, help="made before; by default a new one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place"
        place.mkdir()
        if asked.place:
            shutil.copytree(asked.place, place, dirs_exist_ok=True)
        else:
            write_place(place)
            add_what_is_read(place)
        if asked.replay:
            return tried(asked.replay[0], json.loads(asked.replay[1]), place)
        names, number, bad = [asked.only] if asked.only else list(READERS), 0, set()
        while True:
            for name in names:
                for failure in failures(name, place, examples=asked.examples or 50, number=number):
                    error, _, _ = failure.partition("\n")
                    if error not in bad:
                        print(failure, flush=True)
                    bad.add(error)
            number += 1
            if asked.examples:
                sys.exit(bool(bad))
            print(f"Round {number}: {len(bad)} failures so far.", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
