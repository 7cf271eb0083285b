"""Looking for people's stretches in generated text: seconds and peak memory.

    python benchmarks/synthetic_text.py [--millions 50] [--synthetic 10] [--memory 4000000000]

Zipf corpora, as in counting.py. A hundredth of the synthetic documents are documents of the corpus,
every second of them with one word in twenty changed. Reading the words of the files comes on top:
about 0.7 seconds a million words.
"""

import argparse
import resource
import time
from dataclasses import replace

import numpy as np

from counting import zipf_corpus
from tightlip.audit.synthetic.overlap import Search
from tightlip.engines.local import LocalEngine


def synthetic_of(corpus, num_words):
    """Other text of the same kind, with copies in it."""
    text = zipf_corpus(num_words + 1)  # another draw would do; it is shuffled
    words = np.random.default_rng(7).permutation(text.tokens)
    draw, copies = np.random.default_rng(8), []
    for number in range(0, text.num_documents, 100):
        begin, end = text.bounds[number], text.bounds[number + 1]
        source = int(draw.integers(0, corpus.num_documents))
        own = np.array(corpus.document(source)[: end - begin])
        if number % 200:
            own[::20] = draw.integers(0, 50_000, len(own[::20]))
        words[begin : begin + len(own)] = own
        copies.append(number)
    return replace(text, tokens=words), copies


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=50)
    parser.add_argument("--synthetic", type=float, default=10)
    parser.add_argument("--memory", type=int, default=4_000_000_000)
    given = parser.parse_args()
    corpus = zipf_corpus(int(given.millions * 1e6))
    synthetic, copies = synthetic_of(corpus, int(given.synthetic * 1e6))
    for near in (0.0, 0.1):
        idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        cpu, wall = time.process_time(), time.perf_counter()
        search = Search(
            synthetic=synthetic,
            min_words=8,
            near=near,
            engine=LocalEngine(),
            memory_bytes=given.memory,
        )
        own = search.overlap_with(corpus, None).own
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        found = len(np.unique(np.searchsorted(synthetic.bounds, own["starts"], side="right") - 1))
        print(
            f"near {near}: {wall:.0f} s ({cpu:.0f} s of CPU), peak {peak:.2f} GB (idle {idle:.2f}); "
            f"{len(own):,} stretches in {found:,} documents of {len(copies):,} copied ones"
        )


if __name__ == "__main__":
    main()
