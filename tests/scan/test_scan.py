"""Every token's rank and log-probability against one model call per token and window."""

import logging
import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import tightlip
from models.small_models import small_model
from standins import BigramTable
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.scan import scanner as scanning
from tightlip.scan.scanner import Scanner, segments_of
from tightlip.scan.store import NOT_SCORED

VOCABULARY = 23  # small_models'
WINDOW = 8
BOS = 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": BOS,
    "eos_token_id": 3,
}
GROUPED = SIZES | {"num_key_value_heads": 1}
WINDOWED = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=WINDOW)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED, tie_word_embeddings=True)),
    "transformer": lambda: small_model("transformer"),
    "transformer-tied": lambda: small_model("transformer-tied"),
}
RECURRENT = ["lstm", "lstm-tied", "gru"]
LENGTHS = [0, 1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3, 4 * WINDOW + 1]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small are slower on two threads, and much slower on two busy ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(kind, *, seed=0):
    """Random weights, enlarged until forgetting a token of context shows."""
    if kind in RECURRENT:
        return small_model(kind, seed=seed)
    torch.manual_seed(seed)
    model = WINDOWED[kind]().eval()
    if kind.startswith("transformer"):
        return model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)
    return model


def random_documents(lengths, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(3, VOCABULARY, size=length).tolist() for length in lengths]


def flat(documents):
    bounds = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return np.array([token for ids in documents for token in ids], dtype=np.int32), bounds


def context_start(target, window):
    """The closed form of the window rule: where the context of input row place `target` starts.

    The first window shows everything. Each later one starts `stride` further on, so that the
    first target it answers has half a window before it, and the last a whole one.
    """
    if window is None or target <= window:
        return 0
    stride = window + 1 - math.ceil(window / 2)
    return stride * math.ceil((target - window) / stride)


def answers(model, documents, bos, window):
    """Oracle: (rank, log-probability) of every token in corpus order, None where not predicted.

    The model sees each token's context alone; contexts of one length share a call.
    """
    questions = []
    for ids in documents:
        row = ([] if bos is None else [bos]) + ids
        for target in range(len(row) - len(ids), len(row)):
            questions.append((row[context_start(target, window) : target], row[target]))
    found = [None] * len(questions)
    for length in {len(context) for context, _ in questions} - {0}:
        alike = [number for number, (context, _) in enumerate(questions) if len(context) == length]
        with torch.no_grad():
            contexts = torch.tensor([questions[number][0] for number in alike])
            logits = model(input_ids=contexts).logits[:, -1].float()
        for number, row in zip(alike, logits, strict=True):
            target = questions[number][1]
            log_probs = row.double().log_softmax(-1)
            found[number] = int((row > row[target]).sum()), float(log_probs[target])
    return found


def check(scanned, want):
    ranks, log_probs = scanned
    assert ranks.tolist() == [NOT_SCORED if one is None else one[0] for one in want]
    nans = [math.nan if one is None else one[1] for one in want]
    assert log_probs.tolist() == pytest.approx(nans, rel=1e-4, abs=2e-4, nan_ok=True)


@pytest.mark.parametrize("window", [2, 3, 4, 7, 16, 33])
@pytest.mark.parametrize("has_bos", [True, False])
def test_windows_cover_every_target_once_with_half_a_window_before_it(window, has_bos):
    lengths = np.arange(0, 4 * window + 3)
    cover = segments_of(lengths, has_bos, window)
    seen = {}
    for document, start, end, keep in zip(
        cover.documents, cover.starts, cover.ends, cover.keeps, strict=True
    ):
        assert 0 < end - start <= window
        for target in range(keep, end + 1):
            assert (document, target) not in seen
            seen[document, target] = start
    row_lengths = lengths + int(has_bos)
    assert seen.keys() == {(d, t) for d, size in enumerate(row_lengths) for t in range(1, size)}
    for (_, target), start in seen.items():
        assert start == context_start(target, window)
        assert start == 0 or target - start >= window / 2
        assert start == 0 or target > window


@pytest.mark.parametrize("kind", WINDOWED)
def test_documents_longer_than_the_window_score_as_one_call_per_token(kind):
    model = model_of(kind)
    documents = random_documents(LENGTHS)
    scanned = Scanner(model, bos_id=BOS, window=WINDOW).scan(*flat(documents))
    want = answers(model, documents, BOS, WINDOW)
    check(scanned, want)
    shorter = answers(model, documents[-1:], BOS, WINDOW // 2)
    assert [one[1] for one in shorter] != pytest.approx(
        [one[1] for one in want[-LENGTHS[-1] :]], abs=1e-2
    ), "a context cut elsewhere would not be noticed"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt-neox", "transformer"])
def test_the_window_is_the_one_the_model_was_made_for(kind):
    scanner = Scanner(model_of(kind), bos_id=BOS)
    assert scanner.window == (64 if kind == "transformer" else WINDOW)


@pytest.mark.parametrize("window", [2, 5, 7])
def test_a_smaller_window_may_be_asked_for(window):
    model = model_of("llama")
    documents = random_documents([3, 20])
    scanned = Scanner(model, bos_id=BOS, window=window).scan(*flat(documents))
    check(scanned, answers(model, documents, BOS, window))


@pytest.mark.parametrize("kind", ["gpt2", "transformer", "lstm"])
def test_without_a_begin_token_the_first_token_is_not_scored(kind):
    model = model_of(kind)
    documents = random_documents(LENGTHS[:7], seed=1)
    window = None if kind == "lstm" else WINDOW
    ranks, log_probs = Scanner(model, bos_id=None, window=window).scan(*flat(documents))
    firsts = np.array([0, *np.cumsum([len(ids) for ids in documents if ids])])[:-1]
    assert set(np.flatnonzero(ranks == NOT_SCORED)) == set(firsts)
    check((ranks, log_probs), answers(model, documents, None, window))


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_recurrent_model_carries_its_state_through_the_whole_document(monkeypatch, kind, chunk):
    monkeypatch.setattr(scanning, "RECURRENT_CHUNK", chunk)
    model = model_of(kind)
    documents = random_documents([0, 1, 6, 7, 8, 41])
    ranks, log_probs = Scanner(model, bos_id=BOS, window=4).scan(*flat(documents))
    place = 0
    for ids in documents:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[BOS, *ids]])).logits[0, : len(ids)]
        for row, token in zip(logits, ids, strict=True):
            assert ranks[place] == int((row > row[token]).sum())
            assert log_probs[place] == pytest.approx(
                float(row.double().log_softmax(-1)[token]), abs=1e-4
            )
            place += 1
    assert place == len(ranks)


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "lstm", "gru"])
def test_the_batch_size_does_not_matter(kind, monkeypatch):
    monkeypatch.setattr(scanning, "RECURRENT_CHUNK", 10)
    model = model_of(kind)
    corpus = flat(random_documents([*LENGTHS, *LENGTHS], seed=3))
    results = [
        Scanner(model, bos_id=BOS, batch_tokens=size).scan(*corpus) for size in (1, 40, 10**6)
    ]
    for ranks, log_probs in results[1:]:
        assert np.array_equal(ranks, results[0][0])
        assert log_probs == pytest.approx(results[0][1], abs=1e-4)


def test_a_part_of_the_corpus_scores_as_it_does_in_the_whole():
    tokens, bounds = flat(random_documents(LENGTHS, seed=4))
    scanner = Scanner(model_of("llama"), bos_id=BOS)
    ranks, log_probs = scanner.scan(tokens, bounds)
    part_ranks, part = scanner.scan(tokens, bounds[3:7])
    inside = slice(bounds[3], bounds[6])
    assert np.array_equal(part_ranks, ranks[inside])
    assert part == pytest.approx(log_probs[inside], abs=1e-4)


def capped():
    """Gemma 2 with a cap so low that without it every score would differ."""
    config = Gemma2Config(
        **GROUPED,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4,
        final_logit_softcapping=0.5,
    )
    return Gemma2ForCausalLM(config)


SCALED = {
    "gemma2": capped,
    "cohere": lambda: CohereForCausalLM(CohereConfig(**GROUPED, logit_scale=0.1)),
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_model_that_changes_its_logits_is_believed_and_the_log_says_so(kind, caplog):
    torch.manual_seed(0)
    model = SCALED[kind]().eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30.0)
    documents = random_documents([3, 20])
    with caplog.at_level(logging.INFO, logger="tightlip"):
        scanner = Scanner(model, bos_id=BOS)
        scanned = scanner.scan(*flat(documents))
    assert scanner.output_layer is None
    assert "changes its output layer's logits" in caplog.text
    want = answers(model, documents, BOS, WINDOW)
    check(scanned, want)
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([[BOS]])).last_hidden_state
        plain = model.get_output_embeddings()(hidden)[0, 0].log_softmax(-1)
    assert abs(float(plain[documents[0][0]]) - want[0][1]) > 0.01  # the change mattered


@pytest.mark.parametrize("kind", ["gpt2", "gpt-neox", "llama", "transformer-tied", "lstm"])
def test_the_output_layer_is_applied_to_what_is_scored_only_where_the_model_allows_it(kind):
    model = model_of(kind)
    scanner = Scanner(model, bos_id=BOS)
    scanner.scan(*flat(random_documents([10])))
    assert scanner.output_layer is model.get_output_embeddings()


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_looks_ahead_is_refused(seed):
    torch.manual_seed(seed)
    model = BertLMHeadModel(BertConfig(**SIZES, is_decoder=False)).eval()
    with pytest.raises(UsageError, match="no causal language model"):
        Scanner(model, bos_id=BOS).scan(*flat(random_documents([12], seed=seed)))


def test_the_same_shape_as_a_decoder_is_scanned():
    torch.manual_seed(0)
    model = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    documents = random_documents([12, 30])
    scanned = Scanner(model, bos_id=BOS).scan(*flat(documents))
    check(scanned, answers(model, documents, BOS, WINDOW))


class Cramped(nn.Module):
    """A model on a device that holds so many tokens at once and no more."""

    def __init__(self, model, most_tokens, error=torch.OutOfMemoryError):
        super().__init__()
        self.model, self.most_tokens, self.error = model, most_tokens, error
        self.refused = 0

    def forward(self, input_ids):
        if input_ids.numel() > self.most_tokens:
            self.refused += 1
            raise self.error("DefaultCPUAllocator: can't allocate memory: you tried a lot")
        return self.model(input_ids)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("most_tokens", [90, 200, 555])
def test_out_of_memory_halves_the_batch_and_changes_nothing(most_tokens, error, caplog):
    roomy = BigramTable(VOCABULARY, 5, levels=50)
    corpus = flat(random_documents([3, 80, 5, 77, 80, 1, 60] * 5))
    want = Scanner(roomy, bos_id=BOS).scan(*corpus)
    cramped = Cramped(roomy, most_tokens, error)
    with caplog.at_level(logging.WARNING, logger="tightlip"):
        ranks, log_probs = Scanner(cramped, bos_id=BOS).scan(*corpus)
    assert cramped.refused
    assert "Out of memory" in caplog.text
    assert np.array_equal(ranks, want[0])
    assert np.array_equal(log_probs, want[1])


def test_where_other_machines_have_other_memory_nothing_is_halved(caplog):
    cramped = Cramped(BigramTable(VOCABULARY, 5), 200)
    scanner = Scanner(cramped, bos_id=BOS)
    scanner.halves = False
    with pytest.raises(UsageError, match=r"A batch of 16,384 tokens.*smaller batch_tokens"):
        scanner.scan(*flat(random_documents([80] * 5)))


def test_a_single_row_too_long_for_memory_is_refused_with_its_length():
    cramped = Cramped(BigramTable(VOCABULARY, 5), 128 + 20)
    with pytest.raises(UsageError, match="One row of 300 tokens does not fit"):
        Scanner(cramped, bos_id=BOS).scan(*flat(random_documents([300, 3])))


def test_other_errors_of_the_model_are_not_taken_for_want_of_memory():
    class Broken(BigramTable):
        def forward(self, input_ids):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(UsageError, match=r"first row.*mat1 and mat2"):
        Scanner(Broken(VOCABULARY, 1), bos_id=BOS).scan(*flat(random_documents([5])))


DOCUMENTS = [("ann", "red green blue then red green blue"), ("bob", "up and down"), ("cyd", "")]


def gpt2_for(num_tokens):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=num_tokens, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config).eval()


def words():
    return build_tokenizer(open_corpus(DOCUMENTS), size=100)


def test_a_token_the_model_has_no_embedding_for_is_refused_by_its_number():
    tokenizer = words()
    largest = max(tokenizer.get_vocab()[word] for _, text in DOCUMENTS for word in text.split())
    with pytest.raises(UsageError, match=f"gives token {largest}, but .* for {largest} tokens"):
        tightlip.audit(gpt2_for(largest), DOCUMENTS, tokenizer=tokenizer)


def test_a_begin_token_the_model_has_no_embedding_for_is_refused_by_its_number():
    tokenizer = words()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "[BEGIN]"})
    with pytest.raises(UsageError, match=f"gives token {size}, but .* for {size} tokens"):
        tightlip.audit(gpt2_for(size), DOCUMENTS, tokenizer=tokenizer, begin="always")


def test_padding_the_model_has_no_embedding_for_does_not_matter():
    # The usual way to give GPT-2 a padding token leaves its embeddings one short.
    tokenizer, padded = words(), words()
    model = gpt2_for(len(tokenizer))
    padded.add_special_tokens({"pad_token": "[PAD]"})
    plain = tightlip.audit(model, DOCUMENTS, tokenizer=tokenizer, top_k=9)
    report = tightlip.audit(model, DOCUMENTS, tokenizer=padded, top_k=9)
    assert plain.sequences_in_s > 0
    assert report.sequences.equals(plain.sequences)


def test_a_window_beyond_the_models_positions_is_refused():
    documents = [("ann", "red green " * 100)]
    tokenizer = build_tokenizer(open_corpus(documents), size=30)
    with pytest.raises(UsageError, match="more than the 32 positions"):
        tightlip.audit(gpt2_for(len(tokenizer)), documents, tokenizer=tokenizer, window=100)


def test_what_was_begun_is_the_scan_however_late_it_is_asked_for():
    corpora = [flat(random_documents([30, 4, 17], seed=seed)) for seed in range(3)]
    scanner = Scanner(model_of("lstm"), bos_id=BOS, batch_tokens=20)
    begun = [scanner.begun(*corpus) for corpus in corpora]
    for corpus, columns in [*zip(corpora, begun, strict=True)][::-1]:
        for found, want in zip(columns, scanner.scan(*corpus), strict=True):
            np.testing.assert_array_equal(found, want)
