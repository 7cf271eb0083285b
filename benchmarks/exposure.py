"""Every six-digit number scored: shared beginnings read once, against one text at a time.

    python benchmarks/exposure.py [--device cpu|cuda] [--digits 6] [--case words|pairs] [--tokenizer DIR]

words: the paper's 2×128 LSTM with 10,000 words. pairs: a Llama of SmolLM2-135M's shape and byte
pairs that join digits, learnt from numbers here unless a folder is given. Weights are random: speed
does not depend on them. A part of the candidates is scored text by text, whose rate is the peer's.
"""

import argparse
import os
import platform
import resource
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command sets it

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightlip.audit.canaries.candidates import Candidates, CandidateScorer
from tightlip.corpus.canary_templates import DIGIT_POOL, read_template
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer, word_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.models.loading import load_tokenizer
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


def pairs_on(device, folder):
    """SmolLM2-135M's shape; byte pairs whose first merges are those of digits."""
    if folder is not None:
        tokenizer = load_tokenizer(folder)
    else:
        draw = np.random.default_rng(0)
        numbers = (f"My ID is {number:06}" for number in draw.integers(0, 10**6, 3_000))
        tokenizer = build_tokenizer(open_corpus([("u", text) for text in numbers]), kind="bpe", size=2_000)  # fmt: skip
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).to(device).eval()
    begin = tokenizer.bos_token_id
    return CandidateScorer(Scanner(model, bos_id=0 if begin is None else begin), tokenizer)


def timed(action):
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--digits", type=int, default=6)
    options.add_argument("--case", choices=("words", "pairs"), default="words")
    options.add_argument("--tokenizer", help="of --case pairs: a folder with tokenizer.json")
    chosen = options.parse_args()
    template = read_template(f"My ID is {{digits:{chosen.digits}}}")
    candidates = Candidates(template, tuple(tuple(DIGIT_POOL) for _ in template.places))
    by_words = chosen.case == "words"
    scorer = scorer_on(chosen.device) if by_words else pairs_on(chosen.device, chosen.tokenizer)
    few = Candidates(read_template("My ID is {digits:2}"), candidates.pools[:2])
    scorer.score_all(few)  # kernels are built and threads started
    scores, seconds = timed(lambda: scorer.score_all(candidates))
    numbers = np.random.default_rng(0).choice(len(scores), min(TEXT_BY_TEXT, len(scores)), False)
    texts = candidates.texts(candidates.places_of(numbers))
    rows = scorer.ids_of(texts[:1000])
    print(f"{np.mean([len(row) for row in rows]):.2f} tokens a text")
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
