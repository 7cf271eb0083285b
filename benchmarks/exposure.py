"""Every six-digit number scored under an LSTM: shared beginnings read once, against one text at a time.

    python benchmarks/exposure.py [--device cpu|cuda] [--digits 6]

The model is the paper's 2×128 LSTM with 10,000 words, its weights random: speed does not depend
on them. A part of the candidates is scored text by text, whose rate is the peer's.
"""

import argparse
import os
import platform
import resource
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command sets it

import numpy as np
import torch

from tightlip.audit.canaries.candidates import Candidates, CandidateScorer
from tightlip.corpus.canary_templates import DIGIT_POOL, read_template
from tightlip.corpus.vocabulary import word_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.scan.scanner import Scanner

TEXT_BY_TEXT = 20_000


def scorer_on(device):
    words = ["My", "ID", "is", *DIGIT_POOL, *(f"w{number}" for number in range(9_980))]
    tokenizer = word_tokenizer(words)
    torch.manual_seed(0)
    model = LSTMForCausalLM(
        LSTMConfig(vocab_size=len(tokenizer), embedding_size=128, hidden_size=128, num_layers=2)
    )
    scanner = Scanner(model.to(device), bos_id=tokenizer.bos_token_id)
    return CandidateScorer(scanner, tokenizer)


def timed(action):
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--digits", type=int, default=6)
    chosen = options.parse_args()
    template = read_template(f"My ID is {{digits:{chosen.digits}}}")
    candidates = Candidates(template, tuple(tuple(DIGIT_POOL) for _ in template.places))
    scorer = scorer_on(chosen.device)
    few = Candidates(read_template("My ID is {digits:2}"), candidates.pools[:2])
    scorer.score_all(few)  # kernels are built and threads started
    scores, seconds = timed(lambda: scorer.score_all(candidates))
    numbers = np.random.default_rng(0).choice(len(scores), min(TEXT_BY_TEXT, len(scores)), False)
    texts = candidates.texts(candidates.places_of(numbers))
    single, single_seconds = timed(lambda: scorer.score_texts(texts))
    off = float(np.abs(single - scores[numbers]).max())
    rate, single_rate = len(scores) / seconds, len(texts) / single_seconds
    print(
        f"{platform.processor() or platform.machine()}, {chosen.device}, torch {torch.__version__}"
    )
    print(f"{'':24}{'candidates':>12}{'seconds':>10}{'a second':>12}{'ratio':>8}")
    print(f"{'shared beginnings':24}{len(scores):>12,}{seconds:>10.2f}{rate:>12,.0f}{1:>8.2f}")
    print(f"{'text by text':24}{len(texts):>12,}{single_seconds:>10.2f}{single_rate:>12,.0f}{single_rate / rate:>8.3f}")  # fmt: skip
    print(f"largest difference {off:.1e} nats; peak memory {peak_gib(chosen.device):.2f} GiB")


def peak_gib(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


main()
