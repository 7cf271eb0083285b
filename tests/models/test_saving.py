"""Round trips through files, and fingerprints."""

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from models.small_models import ALL, random_ids, small_model
from tightlip.core.errors import UsageError
from tightlip.models import (
    load_causal_lm,
    model_fingerprint,
    register_when_transformers_loads,
    state_fingerprint,
)

register_when_transformers_loads()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("load", ["own class", "auto class", "tightlip"])
def test_a_saved_model_comes_back_the_same(kind, load, tmp_path):
    model, ids = small_model(kind), random_ids(2, 6)
    model.save_pretrained(tmp_path)
    loader = {
        "own class": type(model).from_pretrained,
        "auto class": AutoModelForCausalLM.from_pretrained,
        "tightlip": load_causal_lm,
    }[load]
    again = loader(tmp_path)
    assert type(again) is type(model)
    assert state_fingerprint(again) == state_fingerprint(model)
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ALL)
def test_auto_model_gives_the_base_model_with_its_weights(kind, tmp_path):
    model, ids = small_model(kind), random_ids(2, 6)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert type(base) is type(model.base_model)
    with torch.no_grad():
        expected = model.base_model(input_ids=ids).last_hidden_state
        assert torch.equal(base(input_ids=ids).last_hidden_state, expected)


@pytest.mark.parametrize("kind", ALL)
def test_auto_config_gives_back_every_setting(kind, tmp_path):
    config = small_model(kind, dropout=0.25).config
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    written, read = config.to_dict(), again.to_dict()
    assert {key for key in written | read if written.get(key) != read.get(key)} <= {
        "_name_or_path",
        "transformers_version",
    }


@pytest.mark.parametrize("kind", ["lstm-tied", "transformer-tied"])
def test_tied_weights_are_one_matrix_after_reloading(kind, tmp_path):
    small_model(kind).save_pretrained(tmp_path)
    again = load_causal_lm(tmp_path)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    with torch.no_grad():
        again.get_input_embeddings().weight[3] += 1.0
    assert torch.equal(again.lm_head.weight, again.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", ["lstm", "gru", "transformer"])
def test_untied_weights_stay_two_matrices(kind, tmp_path):
    small_model(kind).save_pretrained(tmp_path)
    again = load_causal_lm(tmp_path)
    assert again.lm_head.weight is not again.get_input_embeddings().weight


def test_training_after_reloading_changes_what_the_model_says(tmp_path):
    """torch's recurrent layers keep a second list of their weights, which must not go stale."""
    small_model("lstm").save_pretrained(tmp_path)
    again, ids = load_causal_lm(tmp_path), random_ids(1, 5)
    before = again(input_ids=ids).logits
    with torch.no_grad():
        again.model.rnn.weight_hh_l0.mul_(0.0)
    assert not torch.allclose(again(input_ids=ids).logits, before)


def test_the_vocabulary_can_be_resized():
    model = small_model("lstm-tied")
    model.resize_token_embeddings(30)
    assert model(input_ids=torch.tensor([[29]])).logits.shape == (1, 1, 30)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_copied_folder_has_the_same_fingerprint_and_a_changed_one_another(tmp_path):
    small_model("lstm").save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert model_fingerprint(tmp_path / "a") == model_fingerprint(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    with_tokenizer = model_fingerprint(tmp_path / "b")
    small_model("lstm", seed=1).save_pretrained(tmp_path / "b")
    prints = {model_fingerprint(tmp_path / "a"), with_tokenizer, model_fingerprint(tmp_path / "b")}
    assert len(prints) == 3
    with pytest.raises(UsageError, match="no model to fingerprint"):
        model_fingerprint(tmp_path / "nowhere")


def test_one_changed_weight_changes_the_state_fingerprint():
    model = small_model("gru")
    before = state_fingerprint(model)
    assert state_fingerprint(small_model("gru")) == before
    with torch.no_grad():
        model.lm_head.bias[0] = torch.nextafter(model.lm_head.bias[0], torch.tensor(9.0))
    assert state_fingerprint(model) != before
    assert len(state_fingerprint(model.to(torch.bfloat16))) == 64
