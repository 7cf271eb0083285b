"""Models small enough to recompute by hand, and slow ways of doing so."""

import torch

from tightlip.models import (
    GRUConfig,
    GRUForCausalLM,
    LSTMConfig,
    LSTMForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)

VOCABULARY = 23
RECURRENT = ["lstm", "lstm-tied", "gru"]
ALL = [*RECURRENT, "transformer", "transformer-tied"]


def small_model(kind, *, seed=0, dropout=0.0):
    """A random model whose weights are large enough that forgetting the past shows."""
    torch.manual_seed(seed)
    if kind == "lstm":
        model = LSTMForCausalLM(LSTMConfig(VOCABULARY, 6, 10, 2, dropout))
    elif kind == "lstm-tied":
        model = LSTMForCausalLM(LSTMConfig(VOCABULARY, 8, 8, 1, dropout, tie_word_embeddings=True))
    elif kind == "gru":
        model = GRUForCausalLM(GRUConfig(VOCABULARY, 6, 10, 2, dropout))
    else:
        tied = kind.endswith("tied")
        model = TransformerForCausalLM(
            TransformerConfig(VOCABULARY, 12, 2, 3, 64, dropout=dropout, tie_word_embeddings=tied)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if kind.startswith("transformer") else 2.0)
    return model.eval()


def random_ids(*shape, seed=0):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def next_logits(model, prefix):
    """Oracle: read the whole prefix (a list of ids) from nothing, without mask or cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1]


def greedy_by_rereading(model, prefix, num_new):
    prefix = list(prefix)
    for _ in range(num_new):
        prefix.append(int(next_logits(model, prefix).argmax()))
    return prefix


def beams_by_rereading(model, prefix, num_new, num_beams):
    """Oracle: beam search of a fixed length over lists, rereading every beam at every step."""
    beams = [(0.0, list(prefix))]
    for _ in range(num_new):
        longer = [
            (score + float(nats), [*ids, token])
            for score, ids in beams
            for token, nats in enumerate(next_logits(model, ids).log_softmax(-1))
        ]
        beams = sorted(longer, key=lambda beam: -beam[0])[:num_beams]
    return [ids for _, ids in beams]


def left_padded(prompts, pad=0):
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask
