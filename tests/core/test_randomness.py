import copy
import pickle
import secrets

import numpy as np
import pytest

from tightlip.core import randomness
from tightlip.core.errors import GuaranteeError
from tightlip.core.grid_gaussian import GridGaussian
from tightlip.core.randomness import keyed_generator


@pytest.mark.parametrize("far", [1, 2**32, 2**64, 2**127])
def test_seeds_that_torch_would_confuse_give_different_draws(far):
    assert keyed_generator(1).random() != keyed_generator(1 + far).random()


def test_the_key_is_at_least_128_bits_from_the_operating_system(monkeypatch):
    asked = []
    real = secrets.randbits
    monkeypatch.setattr(
        randomness.secrets, "randbits", lambda bits: asked.append(bits) or real(bits)
    )
    keyed = keyed_generator().bit_generator.state["state"]["key"]
    assert asked == [128]
    assert keyed.dtype == np.uint64
    assert keyed.size * 64 == 128


@pytest.mark.parametrize("make", [keyed_generator, GridGaussian])
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_generator_can_be_written_or_copied(make, copied):
    with pytest.raises(GuaranteeError, match="never written"):
        copied(make())
