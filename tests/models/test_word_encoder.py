"""Small encoders: what padding, order and distance do to their vectors, and loading them back."""

import pytest
import torch
from transformers import AutoModel

from models.small_models import random_ids
from tightlip.core.errors import UsageError
from tightlip.models import WordEncoder, WordEncoderConfig, load_encoder
from tightlip.models.encoders import last_first


def small(kind, seed=0):
    torch.manual_seed(seed)
    return WordEncoder(WordEncoderConfig(kind, 23, hidden_size=6)).eval()


def hidden(model, ids, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("kind", ["lstm", "bag"])
def test_padding_changes_nothing_at_real_positions(kind):
    model, ids = small(kind), random_ids(3, 5)
    padded = torch.cat([ids, torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4] * 3)
    assert torch.allclose(hidden(model, padded, mask)[:, :5], hidden(model, ids), atol=1e-6)


def test_rows_of_different_length_read_as_each_alone():
    model = small("lstm")
    short, long = random_ids(1, 3, seed=1), random_ids(1, 7, seed=2)
    both = torch.zeros(2, 7, dtype=torch.int64)
    both[0, :3], both[1] = short[0], long[0]
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    found = hidden(model, both, mask)
    assert torch.allclose(found[0, :3], hidden(model, short)[0], atol=1e-6)
    assert torch.allclose(found[1], hidden(model, long)[0], atol=1e-6)


def test_every_position_of_an_lstm_has_seen_the_whole_text_and_a_bag_only_its_token():
    ids = random_ids(1, 6)
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 1) % 23
    moved = (hidden(small("lstm"), ids) - hidden(small("lstm"), other)).abs().sum(dim=2)[0]
    assert (moved > 1e-7).all()
    moved = (hidden(small("bag"), ids) - hidden(small("bag"), other)).abs().sum(dim=2)[0]
    assert (moved > 0).tolist() == [False, False, False, True, False, False]


def test_the_backward_pass_is_torchs_own():
    """Oracle: a bidirectional nn.LSTM with the same weights."""
    model = small("lstm")
    oracle = torch.nn.LSTM(6, 6, batch_first=True, bidirectional=True)
    weights = dict(model.forwards.state_dict())
    weights |= {f"{name}_reverse": value for name, value in model.backwards.state_dict().items()}
    oracle.load_state_dict(weights)
    ids = random_ids(2, 5)
    with torch.no_grad():
        wanted = model.join(oracle(model.embed_tokens(ids))[0])
    assert torch.allclose(hidden(model, ids), wanted, atol=1e-6)


def test_rows_are_turned_round_within_their_length():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    assert last_first(mask).tolist() == [[2, 1, 0, 3], [0, 1, 2, 3], [3, 2, 1, 0]]


@pytest.mark.parametrize("kind", ["lstm", "bag"])
def test_a_saved_encoder_is_known_to_the_auto_class_and_to_our_loader(kind, tmp_path):
    model, ids = small(kind), random_ids(2, 4)
    model.save_pretrained(tmp_path)
    for again in (AutoModel.from_pretrained(tmp_path), load_encoder(tmp_path)):
        assert type(again) is WordEncoder
        assert torch.equal(hidden(again.eval(), ids), hidden(model, ids))


@pytest.mark.parametrize(
    ("settings", "because"),
    [
        ({"kind": "gru"}, "Unknown encoder 'gru'"),
        ({"hidden_size": 0}, "not a size"),
        ({"dropout": 1.0}, "dropout"),
        ({"kind": "bag", "embedding_size": 3, "hidden_size": 4}, "equal"),
    ],
)
def test_an_impossible_shape_is_refused(settings, because):
    with pytest.raises(UsageError, match=because):
        WordEncoderConfig(**settings)
