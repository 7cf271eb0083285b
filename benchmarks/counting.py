"""Counting 100,000 sequences with their distinct users: tightlip beside its peers.

    python benchmarks/counting.py [--millions 5 20 80] [--peers]

A Zipf corpus, sequences of 3 to 20 tokens taken from it. Each contender runs in a process of its
own; CPU seconds and peak memory are those of index and counts together, above an idle process
that holds the same corpus. Peers (tokengrams, infini-gram) count no users; they take part where
they are installed. Brute force runs at a small size.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

NUM_SEQUENCES = 100_000
VOCABULARY = 50_000
NUM_USERS = 5_000


def zipf_corpus(num_tokens):
    from tightlip.corpus.tokens import TokenizedCorpus

    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, VOCABULARY + 1)
    edges = np.cumsum(weights / weights.sum())
    tokens = np.empty(num_tokens, dtype=np.int32)
    for start in range(0, num_tokens, 1_000_000):  # drawn in pieces, so that memory stays low
        part = tokens[start : start + 1_000_000]
        part[:] = np.minimum(np.searchsorted(edges, draw.random(len(part))), VOCABULARY - 1)
    lengths = draw.integers(50, 400, size=num_tokens // 100)
    cuts = np.cumsum(lengths)
    bounds = np.r_[0, cuts[cuts < num_tokens], num_tokens].astype(np.int64)
    users = draw.integers(0, NUM_USERS, size=len(bounds) - 1).astype(np.int32)
    names = [str(number) for number in range(NUM_USERS)]
    return TokenizedCorpus(
        tokens=tokens, bounds=bounds, users=users, user_names=names,
        corpus_fingerprint="", tokenizer_fingerprint="",
    )  # fmt: skip


def chosen_sequences(corpus, number):
    draw = np.random.default_rng(1)
    documents = draw.integers(0, corpus.num_documents, size=number)
    chosen = []
    for document in documents:
        begin, end = corpus.bounds[document], corpus.bounds[document + 1]
        length = min(int(draw.integers(3, 21)), int(end - begin))
        start = int(draw.integers(begin, end - length + 1))
        chosen.append(corpus.tokens[start : start + length])
    return chosen


def with_tightlip(corpus, chosen):
    from tightlip.audit.leakage.counting import (
        Sequences,
        added_up,
        count_in_shard,
        user_disjoint_parts,
    )

    offsets = np.r_[0, np.cumsum([len(sequence) for sequence in chosen])]
    sequences = Sequences(tokens=np.concatenate(chosen), offsets=offsets)
    shards = (part.read(corpus) for part in user_disjoint_parts(corpus, 4_000_000_000))
    counts = added_up(((s, count_in_shard(s, sequences)) for s in shards), len(chosen))
    return counts.totals, counts.users


def with_brute_force(corpus, chosen):
    rows = [row.tobytes() for row in np.split(corpus.tokens, corpus.bounds[1:-1])]
    totals, users = [], []
    for sequence in chosen:
        needle, total, who = sequence.tobytes(), 0, set()
        for document, row in enumerate(rows):
            at = row.find(needle)
            while at >= 0:
                if at % 4 == 0:
                    total += 1
                    who.add(int(corpus.users[document]))
                at = row.find(needle, at + 1)
        totals.append(total)
        users.append(len(who))
    return np.array(totals), np.array(users)


def with_tokengrams(corpus, chosen):
    from tokengrams import MemmapIndex

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "tokens.bin"
        text.write_bytes(_separated(corpus).tobytes())
        index = MemmapIndex.build(str(text), str(Path(folder) / "index.bin"))
        return np.array([index.count((sequence + 1).tolist()) for sequence in chosen]), None


def with_infini_gram(corpus, chosen):
    from infini_gram import indexing
    from infini_gram.engine import InfiniGramEngine

    with tempfile.TemporaryDirectory() as folder:
        # Its own file format, written directly: it tokenises text by tokenizers from a hub only.
        marks = np.insert(corpus.tokens, corpus.bounds[:-1], 0xFFFF).astype(np.uint16)
        marks.tofile(Path(folder) / "tokenized.0")
        starts = 2 * (corpus.bounds[:-1] + np.arange(corpus.num_documents))
        starts.astype(np.uint64).tofile(Path(folder) / "offset.0")
        where = {"save_dir": folder, "temp_dir": folder, "shards": 1, "workers": 1, "worker_id": 0}
        with contextlib.redirect_stdout(sys.stderr):
            indexing.build_sa(argparse.Namespace(**where, cpus=2, mem=8, token_width=2))
        engine = InfiniGramEngine(
            index_dir=folder,
            eos_token_id=0xFFFF - 1,
            vocab_size=0xFFFF,
            token_dtype="u16",
            version=4,
        )
        return np.array([engine.count(input_ids=s.tolist())["count"] for s in chosen]), None


def _separated(corpus):
    """Token ids plus one with a 0 after each document, in 16 bits."""
    marks = np.insert(corpus.tokens + 1, corpus.bounds[1:], 0)
    return marks.astype(np.uint16)


CONTENDERS = {
    "tightlip": with_tightlip,
    "tokengrams": with_tokengrams,
    "infini-gram": with_infini_gram,
    "brute force": with_brute_force,
}


PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def cpu_seconds():
    usage = [resource.getrusage(who) for who in PROCESSES]
    return sum(part.ru_utime + part.ru_stime for part in usage)


def measure(name, num_tokens, number):
    """In this process: warm up on a little, then count; print JSON."""
    count = CONTENDERS[name]
    small = zipf_corpus(20_000)
    count(small, chosen_sequences(small, 10))
    corpus = zipf_corpus(num_tokens)
    chosen = chosen_sequences(corpus, number)
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, wall = cpu_seconds(), time.perf_counter()
    totals, users = count(corpus, chosen)
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    peak = max(resource.getrusage(who).ru_maxrss for who in PROCESSES)
    print(json.dumps({
        "cpu": cpu, "wall": wall, "idle": idle / 1e6, "peak": peak / 1e6,
        "totals": int(totals.sum()), "users": None if users is None else int(users.sum()),
    }))  # fmt: skip


def measured(name, num_tokens, number=NUM_SEQUENCES):
    command = [sys.executable, __file__, "--measure", name, str(num_tokens), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        print(f"{name:12} {num_tokens / 1e6:6.1f} M   did not run: {reason[:90]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[5, 20, 80])
    parser.add_argument("--measure", nargs=3)
    arguments = parser.parse_args()
    if arguments.measure:
        name, num_tokens, number = arguments.measure
        measure(name, int(num_tokens), int(number))
        return
    runs = [("brute force", 200_000, 2_000), ("tightlip", 200_000, 2_000)]
    runs += [("tightlip", int(m * 1e6), NUM_SEQUENCES) for m in arguments.millions]
    runs += [(peer, 20_000_000, NUM_SEQUENCES) for peer in ("tokengrams", "infini-gram")]
    print(
        "contender     tokens  sequences  CPU s  wall s  µs CPU/token  peak GB  idle GB   totals    users"
    )
    for name, num_tokens, number in runs:
        result = measured(name, num_tokens, number)
        if result:
            print(
                f"{name:12} {num_tokens / 1e6:5.1f} M {number:10,} {result['cpu']:6.2f} {result['wall']:7.2f} "
                f"{result['cpu'] / num_tokens * 1e6:13.3f} {result['peak']:8.2f} {result['idle']:8.2f} "
                f"{result['totals']:8,} {result['users'] if result['users'] is not None else '-':>8}"
            )


if __name__ == "__main__":
    main()
