import math

import numpy as np
import pytest
import torch

from tightlip.audit import dp_check as canary_scores
from tightlip.audit.dp_check import scores_of
from tightlip.core.errors import UsageError
from tightlip.corpus.canaries import CheckKey, write_check_key
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.scan.models import open_model
from tightlip.scan.options import ScanOptions


@pytest.fixture
def place(tmp_path):
    """A small model with its tokenizer, and the key of nine canaries."""
    tokenizer = build_tokenizer(open_corpus([("a", "ant bee cat dog eel fox gnu hen")]))
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 6, 8, 1))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    draw = np.random.default_rng(0)
    key = CheckKey(
        tokens_ML=draw.integers(0, len(tokenizer), (9, 5)), included_M=draw.random(9) < 0.5
    )
    write_check_key(tmp_path / "dp_check.json", key)
    return tmp_path, model, tokenizer, key


def scores_in(folder):
    model = open_model(folder / "model", ScanOptions(device="cpu"))
    return scores_of(model, folder / "dp_check.json")


def loss_by_transformers(model, ids):
    """Oracle: the loss that transformers works out from labels, one canary at a time."""
    row = torch.tensor([ids])
    return model(input_ids=row, labels=row).loss.item()


def test_a_score_is_minus_the_mean_loss_behind_a_bos(place, monkeypatch):
    folder, model, tokenizer, key = place
    model.eval()
    expected = [
        -loss_by_transformers(model, [tokenizer.bos_token_id, *tokens])
        for tokens in key.tokens_ML.tolist()
    ]
    scores = scores_in(folder)
    assert scores == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(canary_scores, "LOGITS_AT_ONCE", 100)
    assert scores_in(folder) == pytest.approx(scores)


def test_a_model_that_gives_no_numbers_is_refused(place):
    folder, model, _, _ = place
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    model.save_pretrained(folder / "model")
    with pytest.raises(UsageError, match="no numbers"):
        scores_in(folder)
