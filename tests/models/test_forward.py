"""One forward pass: losses, padding, chunks, dropout, starting weights."""

import math

import pytest
import torch
from torch import nn

from models.small_models import ALL, RECURRENT, VOCABULARY, random_ids, small_model
from tightlip.core.errors import UsageError
from tightlip.models import (
    GRUConfig,
    LSTMConfig,
    LSTMForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)


def close(left, right):
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def loss_by_hand(logits, labels):
    """Oracle: minus the mean log-probability of the next label, one number at a time."""
    losses = [
        -float(logits[row, place].log_softmax(-1)[labels[row, place + 1]])
        for row in range(labels.shape[0])
        for place in range(labels.shape[1] - 1)
        if labels[row, place + 1] != -100
    ]
    return sum(losses) / len(losses)


def lstm_by_hand(model, ids):
    """Oracle: the textbook equations, one token and one layer at a time."""
    rnn, size = model.model.rnn, model.config.hidden_size
    h, c = [torch.zeros(size) for _ in range(2)], [torch.zeros(size) for _ in range(2)]
    logits = []
    for token in ids:
        x = model.model.embed_tokens.weight[token]
        for layer in range(2):
            weights = [
                getattr(rnn, f"{name}_l{layer}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            gates = weights[0] @ x + weights[2] + weights[1] @ h[layer] + weights[3]
            i, f, g, o = gates.split(size)
            c[layer] = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
            x = h[layer] = o.sigmoid() * c[layer].tanh()
        logits.append(model.lm_head.weight @ x + model.lm_head.bias)
    return torch.stack(logits)


def test_lstm_logits_agree_with_the_textbook_equations():
    model, ids = small_model("lstm"), random_ids(1, 7)
    with torch.no_grad():
        close(model(input_ids=ids).logits[0], lstm_by_hand(model, ids[0].tolist()))


@pytest.mark.parametrize("kind", ALL)
def test_loss_agrees_with_cross_entropy_by_hand(kind):
    model, ids = small_model(kind), random_ids(3, 8)
    labels = ids.clone()
    labels[0, 2:5] = -100
    labels[2, :] = -100
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels)
    assert float(output.loss) == pytest.approx(loss_by_hand(output.logits, labels), rel=1e-5)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_nothing_at_real_positions(kind, use_cache, side):
    model = small_model(kind)
    lengths = [6, 2, 4]
    rows = [random_ids(1, n, seed=n) for n in lengths]
    width = 8 if side == "both" else 6
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    starts = [{"left": width - n, "right": 0, "both": 1}[side] for n in lengths]
    for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        ids[row, start : start + n], mask[row, start : start + n] = rows[row][0], 1
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, use_cache=use_cache)
        for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
            alone = model(input_ids=rows[row], use_cache=use_cache)
            close(together.logits[row, start : start + n], alone.logits[0])
            if use_cache and kind in RECURRENT:
                for part, part_alone in zip(
                    together.past_key_values.parts_LBH, alone.past_key_values.parts_LBH, strict=True
                ):
                    close(part[:, row], part_alone[:, 0])


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_row_of_padding_keeps_its_state(kind):
    model = small_model(kind)
    start = model(input_ids=random_ids(2, 3), use_cache=True).past_key_values
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]])
    end = model(
        input_ids=random_ids(2, 4), attention_mask=mask, past_key_values=start, use_cache=True
    ).past_key_values
    for before, after in zip(start.parts_LBH, end.parts_LBH, strict=True):
        assert torch.equal(before[:, 0], after[:, 0])
        assert not torch.equal(before[:, 1], after[:, 1])
    fresh = model(input_ids=random_ids(2, 4), attention_mask=mask, use_cache=True).past_key_values
    assert all(not part[:, 0].any() for part in fresh.parts_LBH)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("sizes", [[5, 5, 3], [1] * 13, [12, 1]])
def test_chunks_with_carried_state_equal_one_pass(kind, sizes):
    model, ids = small_model(kind), random_ids(2, 13)
    state, pieces = None, []
    with torch.no_grad():
        for chunk in ids.split(sizes, dim=1):
            output = model(input_ids=chunk, past_key_values=state, use_cache=True)
            state = output.past_key_values
            pieces.append(output.logits)
        close(torch.cat(pieces, dim=1), model(input_ids=ids).logits)
    assert state.get_seq_length() == 13


@pytest.mark.parametrize("kind", RECURRENT)
def test_many_continuations_can_start_from_one_state(kind):
    model, ids = small_model(kind), random_ids(1, 5)
    with torch.no_grad():
        state = model(input_ids=ids, use_cache=True).past_key_values
        for token in (4, 9):
            new = torch.tensor([[token]])
            whole = model(input_ids=torch.cat([ids, new], dim=1)).logits[:, -1]
            close(model(input_ids=new, past_key_values=state).logits[:, -1], whole)


@pytest.mark.parametrize("kind", ALL)
def test_a_later_token_changes_nothing_before_it(kind):
    model, ids = small_model(kind), random_ids(1, 9)
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(input_ids=ids).logits, model(input_ids=changed).logits
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("kind", ALL)
def test_logits_to_keep_keeps_the_last_or_the_named_positions(kind):
    model, ids = small_model(kind), random_ids(2, 6)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        close(model(input_ids=ids, logits_to_keep=2).logits, whole[:, -2:])
        named = torch.tensor([1, 4])
        close(model(input_ids=ids, logits_to_keep=named).logits, whole[:, named])


@pytest.mark.parametrize("kind", ALL)
def test_embeddings_may_be_given_instead_of_ids(kind):
    model, ids = small_model(kind), random_ids(2, 6)
    with torch.no_grad():
        vectors = model.get_input_embeddings()(ids)
        close(model(inputs_embeds=vectors).logits, model(input_ids=ids).logits)
    with pytest.raises(UsageError, match="both came"):
        model(input_ids=ids, inputs_embeds=vectors)


@pytest.mark.parametrize("kind", ALL)
def test_the_base_model_gives_what_the_output_layer_reads(kind):
    model, ids = small_model(kind), random_ids(2, 6)
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        close(model.get_output_embeddings()(hidden), model(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ALL)
def test_dropout_acts_in_training_only(kind):
    model, ids = small_model(kind, dropout=0.5), random_ids(2, 6)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ALL)
def test_every_weight_learns(kind):
    """No row of the embedding is frozen, padded training included."""
    model, ids = small_model(kind).train(), random_ids(3, 6)
    ids[0, 0] = 0
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    output = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    assert output.past_key_values is None
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.get_input_embeddings().weight.grad[0].any()


@pytest.mark.parametrize("kind", ["lstm", "gru", "transformer"])
def test_a_small_corpus_is_learned(kind):
    model, ids = small_model(kind).train(), random_ids(4, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = model(input_ids=ids, labels=ids).loss.item()
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3 * first


def test_lstm_weights_start_as_documented():
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(50, 8, 16, 2))
    weight_hh, bias_ih = model.model.rnn.weight_hh_l1, model.model.rnn.bias_ih_l1
    for gate in weight_hh.detach().split(16):
        close(gate @ gate.T, torch.eye(16))
    assert bias_ih.tolist() == [0.0] * 16 + [1.0] * 16 + [0.0] * 32
    assert not model.model.rnn.bias_hh_l1.any()
    assert not model.lm_head.bias.any()
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.15)
    assert 0.09 < model.lm_head.weight.abs().max().item() <= 0.1
    tied = LSTMForCausalLM(LSTMConfig(50, 16, 16, 2, tie_word_embeddings=True))
    assert 0.09 < tied.model.embed_tokens.weight.abs().max().item() <= 0.1


def test_transformer_weights_start_as_documented():
    torch.manual_seed(0)
    model = TransformerForCausalLM(TransformerConfig(500, 64, 8, 4))
    block = model.model.blocks[3]
    assert block.widen.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.output.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.1)
    assert block.attention.output.weight.std().item() == pytest.approx(
        0.02 / math.sqrt(16), rel=0.1
    )
    loss = model(input_ids=torch.arange(40)[None], labels=torch.arange(40)[None]).loss
    assert loss.item() == pytest.approx(math.log(500), rel=0.05)


@pytest.mark.parametrize("kind", ALL)
def test_only_layers_that_the_dp_engine_knows_have_weights(kind):
    known = (nn.Embedding, nn.Linear, nn.LSTM, nn.GRU, nn.LayerNorm)
    for module in small_model(kind).modules():
        assert isinstance(module, known) or not list(module.parameters(recurse=False))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: LSTMConfig(vocab_size=0), "vocab_size=0 is not a size"),
        (lambda: GRUConfig(hidden_size=-3), "hidden_size=-3"),
        (lambda: LSTMConfig(num_layers=1.5), "num_layers=1.5"),
        (lambda: LSTMConfig(dropout=1.0), "dropout=1.0"),
        (lambda: TransformerConfig(dropout=-0.1), "dropout=-0.1"),
        (
            lambda: GRUConfig(embedding_size=4, hidden_size=5, tie_word_embeddings=True),
            "embedding_size=4 and hidden_size=5: one matrix cannot serve both ends",
        ),
        (lambda: TransformerConfig(hidden_size=10, num_heads=4), "multiple of 4, such as 12"),
        (lambda: TransformerConfig(max_position_embeddings=0), "max_position_embeddings=0"),
    ],
)
def test_impossible_shapes_are_usage_errors(wrong, message):
    with pytest.raises(UsageError, match=message):
        wrong()


def test_a_mask_of_the_wrong_shape_is_a_usage_error():
    for kind in ("lstm", "transformer"):
        with pytest.raises(UsageError, match="attention_mask has shape"):
            small_model(kind)(input_ids=random_ids(1, 5), attention_mask=torch.ones(1, 3))


def test_configurations_say_whether_they_are_recurrent():
    assert LSTMConfig().is_recurrent
    assert GRUConfig().is_recurrent
    assert not TransformerConfig().is_recurrent
    assert not LSTMConfig().tie_word_embeddings
