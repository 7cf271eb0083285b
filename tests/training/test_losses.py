import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tightlip.models import (
    GRUConfig,
    GRUForCausalLM,
    LSTMConfig,
    LSTMForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)
from tightlip.training import losses
from tightlip.training.batches import gather, rows_of
from tightlip.training.losses import Forward, like_lengths, perplexity, validation_scores
from training.small_corpora import prepared

V = 20
MODELS = {
    "lstm": lambda: LSTMForCausalLM(LSTMConfig(V, 6, 8, 2)),
    "lstm-tied": lambda: LSTMForCausalLM(LSTMConfig(V, 8, 8, 1, tie_word_embeddings=True)),
    "gru": lambda: GRUForCausalLM(GRUConfig(V, 6, 8, 1)),
    "transformer": lambda: TransformerForCausalLM(TransformerConfig(V, 8, 2, 2, 16)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0,
            embd_pdrop=0, attn_pdrop=0,
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    corpus = prepared(tmp_path_factory.mktemp("corpus") / "prepared", num_documents=20)
    return rows_of(corpus.train, sequence_length=9, bos=2, pad=0)


def model_of(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def loss_by_transformers(model, rows, chosen):
    """Oracle: each row alone, its loss as transformers computes it, weighted by its targets."""
    losses = []
    for row in chosen:
        ids = gather(rows, np.array([row])).input_ids_BT
        losses.append(model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1))
    return sum(losses) / rows.num_targets[chosen].sum()


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_transformers_row_by_row(kind, rows, monkeypatch):
    monkeypatch.setitem(losses.CHUNK, "cpu", 7)
    ours, theirs = model_of(kind), model_of(kind)
    chosen = np.arange(8)
    loss = Forward(ours).mean_loss(gather(rows, chosen))
    (3 * loss).backward()
    expected = loss_by_transformers(theirs, rows, chosen)
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["lstm", "transformer", "gpt2"])
def test_padding_further_changes_no_loss(kind, rows):
    model, chosen = model_of(kind), np.arange(5)
    tight = Forward(model).mean_loss(gather(rows, chosen))
    wide = Forward(model).mean_loss(gather(rows, chosen, widths=(16,)))
    torch.testing.assert_close(tight, wide)


@pytest.mark.parametrize("kind", ["lstm", "gpt2"])
def test_what_a_compiled_model_would_compute_is_the_same(kind, rows, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    model, batch = model_of(kind), gather(rows, np.arange(5), widths=(16,))
    plain, compiled = Forward(model), Forward(model, compiled_rows=5)
    torch.testing.assert_close(plain.mean_loss(batch), compiled.mean_loss(batch))


@pytest.mark.parametrize("kind", MODELS)
def test_validation_is_what_scoring_each_row_by_itself_gives(kind, rows):
    model = model_of(kind).train()
    scores = validation_scores(Forward(model), rows)
    assert model.training
    model.eval()
    loss = first = count = 0
    for row in range(len(rows)):
        ids = gather(rows, np.array([row])).input_ids_BT[0]
        with torch.no_grad():
            log_probabilities = model(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
        for place in range(1, len(ids)):
            loss -= log_probabilities[place - 1, ids[place]].item()
            first += int(log_probabilities[place - 1].argmax() == ids[place])
            count += 1
    assert scores.loss_nats == pytest.approx(loss, rel=1e-5)
    assert (scores.num_first, scores.num_targets) == (first, count)


def test_validation_does_not_drop_anything_out(rows):
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(V, 6, 8, 2, 0.5)).train()
    forward = Forward(model)
    assert validation_scores(forward, rows) == validation_scores(forward, rows)


def test_validation_batches_hold_every_row_once_and_no_more_than_they_may(rows):
    batches = like_lengths(rows, 40)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) == 1 or rows.num_targets[batch].max() * len(batch) <= 40


def test_perplexity_is_none_where_it_has_no_number():
    assert perplexity(0.0, 0) is None
    assert perplexity(1e6, 1) is None
    assert perplexity(2 * np.log(7), 2) == pytest.approx(7)
