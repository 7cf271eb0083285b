"""An audit of a corpus with the paper's distribution of users, at parts of its size.

    python benchmarks/scale.py [--parts 1000 100 30] [--model lstm|gpt2] [--device cuda] [--memory 4GB]

Inan et al. audited models of 140 million sentences of 4.4 million users. Here a user writes as many
sentences as a discrete Pareto law says, P(N > n) = (1 + n / s)^-α with α = 1.5 and s such that the mean
is 31.8, the paper's: most write a few, some thousands. A sentence has 4 to 24 words of a Zipf law over
10,000 words, 14 on average. One part in 1000 is 140,000 sentences of 4,400 users, 2 million tokens.

Each part is made in a process of its own, which reads it from Parquet, tokenises, scans, collects runs,
counts and writes the report, as `tightlip audit` does: the stages are timed apart, in microseconds a
token, beside the most of its own memory in each stage, above that of the loaded model; files that it
maps are not counted. Asked for: cost a token flat within 15% from one part to the next, and memory
bounded (of this process: those that read texts, with four cores and more, take up to 220 MB each beside
it). *Shared* is what several processes, or machines, may do at the same time, of tokenising and by text,
where one process did it. `--model random` gives ranks at random, at the share of hits that --hits says,
in the place of a model: stages around the scan at sizes that a CPU could not scan.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SENTENCES, USERS = 140_000_000, 4_400_000
ALPHA, VOCABULARY = 1.5, 10_000
STAGES = ("read", "tokenise", "scan", "runs and count", "by text", "report")


def sentences_of_users(num_users, draw):
    """How many sentences each user writes: at least one, 31.8 on average, with a heavy tail."""
    mean = SENTENCES / USERS
    scale = (mean - 0.5) * (ALPHA - 1)  # a continuous Lomax law of this mean, rounded up
    return np.ceil(scale * (draw.random(num_users) ** (-1 / ALPHA) - 1)).clip(1, 20_000).astype(int)


def write_corpus(path, part):
    """One part in `part` of the paper's corpus, as a Parquet file; returns sentences and tokens."""
    draw = np.random.default_rng(part)
    users = np.repeat(np.arange(USERS // part), sentences_of_users(USERS // part, draw))
    draw.shuffle(users)
    users = users[: SENTENCES // part]
    edges = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    words = pa.array([f"w{number}x" for number in range(VOCABULARY)])
    schema, num_tokens = pa.schema({"user": pa.string(), "text": pa.string()}), 0
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, len(users), 20_000):
            some = users[begin : begin + 20_000]
            lengths = draw.integers(4, 25, len(some))
            drawn = words.take(np.searchsorted(edges, draw.random(lengths.sum()) * edges[-1]))
            ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
            texts = pc.binary_join(pa.ListArray.from_arrays(ends, drawn), " ")
            names = pc.binary_join_element_wise("user", pc.cast(pa.array(some), pa.string()), " ")
            writer.write_table(pa.table({"user": names, "text": texts}, schema=schema))
            num_tokens += int(lengths.sum())
    return len(users), num_tokens


def make_model(kind, device, dtype):
    import torch

    from tightlip.models import LSTMConfig, LSTMForCausalLM

    torch.manual_seed(0)
    size = VOCABULARY + 4
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(vocab_size=size))
    else:
        width = 550 if device == "cuda" else 32
        model = LSTMForCausalLM(LSTMConfig(vocab_size=size, embedding_size=width, hidden_size=width, num_layers=2))  # fmt: skip
    return model.to(device=device, dtype=getattr(torch, dtype)).eval()


def make_tokenizer(folder):
    """A word tokenizer of all the words, as prepare would make it of the corpus."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<s>", "</s>"]
    words = [*special, *(f"w{number}x" for number in range(VOCABULARY))]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip


class Clock:
    """Seconds by the clock, and of the CPU, by stage."""

    def __init__(self):
        self.wall, self.cpu = {}, {}

    @contextmanager
    def stage(self, name):
        wall, cpu = time.perf_counter(), cpu_seconds()
        yield
        self.wall[name] = self.wall.get(name, 0) + time.perf_counter() - wall
        self.cpu[name] = self.cpu.get(name, 0) + cpu_seconds() - cpu


def engine_watched(engine, shared):
    """The engine; of what it hands to `map_python` the seconds of the CPU that it takes here."""
    plain = engine.map_python

    def watched(function, items):
        def timed(item):
            start = time.process_time()
            result = function(item)
            shared.append(time.process_time() - start)
            return result

        # A function of its own cannot be pickled, so that all is done here: only where that is so.
        return plain(timed if engine.num_python == 1 else function, items)

    engine.map_python = watched
    return engine


def cpu_seconds():
    """Of this process and of the children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


class Memory:
    """The process' own memory, looked at every hundredth of a second: what it maps from files, the
    system takes back when it needs the room."""

    def __init__(self):
        self._most = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self):
        page = resource.getpagesize()
        while True:
            _, resident, mapped, *_ = Path("/proc/self/statm").read_text().split()
            self._most = max(self._most, (int(resident) - int(mapped)) * page)
            time.sleep(0.01)

    def most(self):
        """The most since this was last asked."""
        most, self._most = self._most, 0
        return most


def random_ranks(share):
    """In the place of a model: a token in the first place with this probability."""
    draw = np.random.default_rng(0)

    def scan(tokens, bounds):
        size = int(bounds[-1] - bounds[0])
        ranks = np.where(draw.random(size) < share, 0, 7).astype(np.int32)
        return ranks, np.full(size, -1.0, np.float32)

    return scan


def measure(part, folder, kind, device, dtype, share, memory_bound, workers):
    """In this process: all stages of one part, printed as JSON."""
    from tightlip.audit.leakage import by_text as texts
    from tightlip.audit.leakage.findings import tokens_with_text
    from tightlip.audit.leakage.leaks import find_leaks
    from tightlip.core.settings import bytes_from
    from tightlip.corpus.opening import CorpusSource, tokenised_for
    from tightlip.engines.local import LocalEngine
    from tightlip.scan.scanner import Scanner
    from tightlip.scan.store import ScanStore

    path, clock, seconds = folder / "corpus.parquet", Clock(), []
    engine, shared = engine_watched(LocalEngine(workers), seconds), {}
    tokenizer, limit = make_tokenizer(folder), bytes_from(memory_bound)
    source = CorpusSource(str(path), {})
    if kind == "random":
        scan = random_ranks(share)
    else:
        scanner = Scanner(make_model(kind, device, dtype), bos_id=tokenizer.bos_token_id)
        scan = scanner.scan
        scan(np.arange(4, 400, dtype=np.int32), np.array([0, 200, 396]))  # compile, warm up
    memory = Memory()
    time.sleep(0.1)
    idle, peaks = memory.most(), {}
    with clock.stage("read"):
        for _ in source.documents().batches():
            pass
    with clock.stage("tokenise"):
        corpus = tokenised_for(source, tokenizer, folder / "tokens", engine=engine)
    peaks["tokenise"], shared["tokenise"] = memory.most(), sum(seconds)
    seconds.clear()
    with clock.stage("scan"):
        store = ScanStore(folder / "scan")
        scanned = store.scan(corpus, key={}, open_scan=lambda: scan, description="Scanning")
    peaks["scan"] = memory.most()
    carries = tokens_with_text(tokenizer, corpus)
    with clock.stage("runs and count"):
        leaks = find_leaks(
            scanned, top_k=1, carries_text=carries, engine=engine, memory_bytes=limit, work=folder
        )
    peaks["runs and count"] = memory.most()
    with clock.stage("by text"):
        words = texts.read_by_text(leaks, source.documents(), tokenizer, engine=engine, memory_bytes=limit, work=folder)  # fmt: skip
    peaks["by text"], shared["by text"] = memory.most(), sum(seconds)
    with clock.stage("report"):
        write_tables(folder, leaks, words, tokenizer)
    peaks["report"] = memory.most()
    print(json.dumps({
        "part": part, "tokens": corpus.num_tokens, "documents": corpus.num_documents, "users": corpus.num_users,
        "runs": len(leaks.runs), "wall": clock.wall, "cpu": clock.cpu, "idle": idle, "peaks": peaks,
        "shared": shared if seconds else {},
    }))  # fmt: skip


def write_tables(folder, leaks, by_text, tokenizer):
    from tightlip.audit.leakage.findings import decoder_of
    from tightlip.audit.leakage.tables import ratio_of_sequence, write_sequences, write_users
    from tightlip.audit.settings import LeakageConfig

    config, ratios = LeakageConfig(), ratio_of_sequence(leaks, None)
    (folder / "report").mkdir()
    write_sequences(folder / "report", leaks, by_text, ratios, None, decoder_of(tokenizer), config)
    write_users(folder / "report", leaks, by_text, ratios, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, nargs="+", default=[1000, 100, 30])
    parser.add_argument("--model", choices=["lstm", "gpt2", "random"], default="lstm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hits", type=float, default=0.35)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--workers", type=int, help="of the engine; default: one for each core")
    parser.add_argument("--measure")
    arguments = parser.parse_args()
    how = [arguments.model, arguments.device, arguments.dtype, arguments.hits, arguments.memory]
    how.append(arguments.workers)
    if arguments.measure:
        measure(arguments.parts[0], Path(arguments.measure), *how)
        return
    print(f"{platform.processor()}, {arguments.device}, {arguments.model}; CPU µs a token (by the clock)")  # fmt: skip
    print(
        "| part | sentences | users | tokens | "
        + " | ".join(STAGES)
        + " | all | shared | own memory above idle |"
    )
    print("|---|---|---|---|" + "---|" * (len(STAGES) + 3))
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder) / "corpus.parquet", part)
            command = [sys.executable, __file__, *sys.argv[1:], "--parts", str(part), "--measure", folder]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        show(json.loads(done.stdout.splitlines()[-1]))


def show(result):
    tokens, cpu, wall = result["tokens"], result["cpu"], result["wall"]
    cells = [f"{cpu[name] / tokens * 1e6:.2f} ({wall[name] / tokens * 1e6:.2f})" for name in STAGES]
    total = f"{sum(cpu.values()) / tokens * 1e6:.2f} ({sum(wall.values()) / tokens * 1e6:.2f})"
    shared = ", ".join(f"{name} {each / tokens * 1e6:.2f}" for name, each in result["shared"].items())  # fmt: skip
    peaks = ", ".join(f"{name} {(peak - result['idle']) / 1e6:,.0f}" for name, peak in result["peaks"].items())  # fmt: skip
    print(
        f"| 1/{result['part']} | {result['documents']:,} | {result['users']:,} | {tokens:,} | "
        + " | ".join(cells)
        + f" | {total} | {shared} | {peaks} MB |",
        flush=True,
    )


if __name__ == "__main__":
    main()
