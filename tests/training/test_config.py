import tomllib

import pytest

from tightlip.core.errors import UsageError
from tightlip.core.settings import toml_text
from tightlip.training.config import RunOptions, TrainConfig


def test_a_configuration_comes_back_from_its_toml():
    config = TrainConfig.of(model="gru", steps=7, gradient_clip=1.0, learning_rate=3e-5)
    assert TrainConfig.from_tree(tomllib.loads(toml_text(config.tree())), "") == config


def test_an_unknown_name_in_a_file_is_refused_with_the_closest():
    with pytest.raises(UsageError, match=r"c\.toml.*'learnin_rate'\. Closest: learning_rate\."):
        TrainConfig.from_tree({"learnin_rate": 0.1}, "c.toml")


def test_training_takes_five_epochs_unless_told_and_never_two_lengths():
    assert TrainConfig.of().epochs == 5.0
    assert TrainConfig.of(steps=10).epochs is None
    with pytest.raises(UsageError, match="Give one of them"):
        TrainConfig.of(steps=10, epochs=1)


def test_whole_numbers_pass_for_floats_so_that_equal_settings_are_equal():
    assert TrainConfig.of(epochs=2).tree() == TrainConfig.of(epochs=2.0).tree()
    assert isinstance(TrainConfig.of(epochs=2).epochs, float)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "adm"}, r"Unknown optimizer 'adm'\. Closest: adam"),
        ({"schedule": "cosin"}, "Closest: cosine"),
        ({"snapshot": "always"}, "Unknown snapshot"),
        ({"model": "lsmt"}, r"Closest: lstm.*Hugging Face model folder"),
        ({"mitigation": "prayer"}, "Unknown mitigation 'prayer'"),
        ({"batch_size": 0}, r"batch_size=0 is out of range\. It must be at least 1"),
        ({"learning_rate": 0.0}, "It must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": "0.1"}, "learning_rate='0.1' is text, and a number belongs there"),
        ({"batch_size": 1.5}, "batch_size=1.5 is a number, and a whole number belongs"),
        ({"batch_size": True}, "batch_size=True is true or false"),
        ({"dropout": 1.0}, "at least 0|below 1"),
        ({"until_perplexity": 1}, r"until_perplexity=1 is out of range\. It must be above 1"),
        ({"momentum": 0.9}, "means nothing to adam"),
        ({"early_stop": 0}, "early_stop"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_cannot_work_is_refused_in_words(settings, words):
    with pytest.raises(UsageError, match=words):
        TrainConfig.of(**settings)


def test_options_are_checked_too():
    with pytest.raises(UsageError, match="checkpoint_seconds"):
        RunOptions(checkpoint_seconds=-1)
