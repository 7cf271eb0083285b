import copy
import math
import os
import pickle
import secrets

import numpy as np
import pytest
from scipy import stats

from tightlip.core import randomness
from tightlip.core.errors import GuaranteeError
from tightlip.core.randomness import CHUNK, NoiseSource, keyed_generator

MANY = 3 * CHUNK + 17  # several streams, the last one short


def noise(source, shape=MANY):
    out = np.full(shape, np.nan, np.float32)
    source.fill(out)
    return out


def looks_standard(sample, *, deviations=5.0):
    """Mean and mean square within `deviations` standard errors of a standard normal's."""
    sample = sample.astype(np.float64).ravel()
    mean_off = abs(sample.mean()) * math.sqrt(sample.size)
    square_off = abs(np.square(sample).mean() - 1) * math.sqrt(sample.size / 2)
    return max(mean_off, square_off) < deviations


@pytest.mark.parametrize(("scale", "right"), [(0.8, False), (1.0, True), (1.25, False)])
def test_noise_of_the_right_scale_passes_and_of_any_other_fails(scale, right):
    assert looks_standard(scale * noise(NoiseSource(insecure_seed=1))) == right


def test_noise_has_a_normal_shape_with_its_tails():
    sample = np.sort(noise(NoiseSource(insecure_seed=2)).astype(np.float64))
    normal = 0.5 * np.vectorize(math.erfc)(-sample / math.sqrt(2))
    distance = np.abs(normal - (np.arange(sample.size) + 0.5) / sample.size).max()
    assert distance * math.sqrt(sample.size) < 1.95  # Kolmogorov's law: p = 0.001


def test_the_number_of_threads_changes_no_value():
    one = noise(NoiseSource(insecure_seed=3, num_threads=1))
    many = noise(NoiseSource(insecure_seed=3, num_threads=5))
    assert np.array_equal(one, many)


def test_every_entry_of_any_shape_is_filled():
    assert np.isfinite(noise(NoiseSource(), (7, 3, 5))).all()
    assert noise(NoiseSource(), (0, 4)).size == 0


def test_a_seed_repeats_a_source_but_no_fill_of_it_repeats_another():
    first, second = NoiseSource(insecure_seed=4), NoiseSource(insecure_seed=4)
    one, two = noise(first), noise(first)
    assert np.array_equal(one, noise(second))
    assert not np.intersect1d(one[:2000], two[:2000]).size
    assert looks_standard((one + two) / math.sqrt(2))  # independent, so variances add


def test_chunks_of_one_fill_share_no_stream():
    filled = noise(NoiseSource(insecure_seed=5))
    chunks = [filled[start : start + CHUNK] for start in range(0, 3 * CHUNK, CHUNK)]
    for other in chunks[1:]:
        assert abs(np.corrcoef(chunks[0], other)[0, 1]) < 5 / math.sqrt(CHUNK)


def test_two_sources_never_share_noise():
    one, other = noise(NoiseSource()), noise(NoiseSource())
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(MANY)


@pytest.mark.parametrize("far", [1, 2**32, 2**64, 2**127])
def test_seeds_that_torch_would_confuse_give_different_noise(far):
    near = noise(NoiseSource(insecure_seed=1), 100)
    assert not np.array_equal(near, noise(NoiseSource(insecure_seed=1 + far), 100))
    assert keyed_generator(1).random() != keyed_generator(1 + far).random()


def test_sampling_and_noise_under_one_seed_are_not_the_same_stream():
    generator = keyed_generator(6)
    drawn = generator.standard_normal(1000, dtype=np.float32)
    assert not np.intersect1d(drawn, noise(NoiseSource(insecure_seed=6), 1000)).size


def test_the_key_is_at_least_128_bits_from_the_operating_system(monkeypatch):
    asked = []
    real = secrets.randbits
    monkeypatch.setattr(
        randomness.secrets, "randbits", lambda bits: asked.append(bits) or real(bits)
    )
    keyed = keyed_generator().bit_generator.state["state"]["key"]
    NoiseSource()
    assert asked == [128, 128]
    assert keyed.dtype == np.uint64
    assert keyed.size * 64 == 128


@pytest.mark.parametrize("make", [keyed_generator, NoiseSource])
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_generator_can_be_written_or_copied(make, copied):
    with pytest.raises(GuaranteeError, match="never written"):
        copied(make())


def test_a_forked_process_cannot_draw_its_parents_noise():
    source = NoiseSource()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            noise(source)
        except GuaranteeError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    noise(source)


def test_the_tail_reaches_beyond_what_a_shift_can_show():
    """Words of 0 are the rarest draw: it must lie as far out as the accounting looks."""

    class Zeros:
        def random_raw(self, count):
            return np.zeros(count, np.uint64)

    out = np.empty(2, np.float32)
    randomness._draw(out, Zeros())
    assert out[0] > 9.4


def test_tails_are_as_heavy_as_the_normal_law_says():
    noise = np.empty(20_000_000, np.float32)
    NoiseSource(5, num_threads=1).fill(noise)
    for deviations in (4.0, 5.0):
        beyond = int((np.abs(noise) > deviations).sum())
        chance = 2 * stats.norm.sf(deviations)
        assert stats.binomtest(beyond, len(noise), chance).pvalue > 1e-3
