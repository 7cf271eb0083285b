"""A regulariser's step in one graph against the step taken directly, here without a GPU's capture."""

import pytest
import torch

from tightlip.training.mitigations.regulariser import StatePasses
from training.test_regularisers import EACH, begun, corpus, one_thread, small  # noqa: F401

STEPS = 5


def after(training, num_steps):
    for number in range(num_steps):
        training.mitigation.step(number)
    return training


def in_one_graph(training):
    mitigation = training.mitigation
    mitigation.states = StatePasses(
        training.model, mitigation._weighted_term, mitigation.own_state, bf16=False
    )
    return training


@pytest.mark.parametrize(
    "shape",
    [
        {"model": "lstm", "num_layers": 2},
        {"model": "gru"},
        {"model": "lstm", "tie_word_embeddings": True},
    ],
    ids=["lstm", "gru", "tied"],
)
@EACH
def test_both_ways_to_take_a_step_give_the_same_weights(settings, shape, corpus, tmp_path):  # noqa: F811
    config = small(**settings, **shape, privacy_weight=0.7, privacy_warmup_steps=2)
    direct = after(begun(corpus, tmp_path / "direct", config), STEPS)
    together = after(in_one_graph(begun(corpus, tmp_path / "graph", config)), STEPS)
    for name, weight in direct.model.state_dict().items():
        torch.testing.assert_close(
            together.model.state_dict()[name], weight, rtol=0, atol=2e-5, msg=name
        )
    own, other = (run.mitigation.state_dict() for run in (direct, together))
    # With λ = 0 the direct way leaves the term out, so its tallies begin a step later.
    for name in own.keys() - {"sums"}:
        torch.testing.assert_close(other[name], own[name], rtol=0, atol=2e-5, msg=name)


@EACH
def test_what_is_tallied_is_the_same_either_way(settings, corpus, tmp_path):  # noqa: F811
    config = small(**settings, privacy_weight=0.7)
    direct = after(begun(corpus, tmp_path / "direct", config), STEPS)
    together = after(in_one_graph(begun(corpus, tmp_path / "graph", config)), STEPS)
    torch.testing.assert_close(
        together.mitigation.sums, direct.mitigation.sums, rtol=1e-4, atol=1e-4
    )
    assert direct.mitigation.sums.abs().sum() > 0


@EACH
def test_a_trial_run_changes_nothing_that_the_mitigation_keeps(
    settings,
    corpus,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    training = in_one_graph(begun(corpus, tmp_path / "run", small(**settings, privacy_weight=0.7)))
    after(training, 2)

    def kept():
        return [tensor.detach().clone() for tensor in training.mitigation.own_state()]

    def tried_first(passes, *tensors):
        passes._try_out(*tensors)
        tried.append(kept())
        return passes._gradients(*tensors)

    tried, before = [], kept()
    monkeypatch.setattr(StatePasses, "__call__", tried_first)
    training.mitigation.step(2)
    assert all(torch.equal(one, other) for one, other in zip(tried[0], before, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(kept(), before, strict=True))
