import pytest
import torch

from tightlip.core.devices import looks_ahead, rounding_tolerance

IDS = torch.arange(1, 22)[None]
TIGHT = rounding_tolerance(torch.float32)


def spread(values_BT):
    """Some logits out of one number per position."""
    return values_BT[..., None] * torch.tensor([1.0, -0.5, 0.25])


def sums_so_far(ids):
    return spread(ids.float().cumsum(1))


def test_a_model_that_looks_back_only_passes():
    assert not looks_ahead(sums_so_far, IDS, tolerance=TIGHT)
    assert not looks_ahead(sums_so_far, IDS[:, :1], tolerance=TIGHT)


@pytest.mark.parametrize("place", [0, 1, 7, 19])
def test_one_position_that_sees_the_next_is_found_wherever_a_row_is_cut(place):
    def peeking(ids):
        logits = sums_so_far(ids)
        if place + 1 < ids.shape[1]:
            logits[:, place] += ids[:, place + 1, None]
        return logits

    assert looks_ahead(peeking, IDS, tolerance=TIGHT)


def test_a_model_that_goes_by_the_length_of_the_row_is_found():
    assert looks_ahead(lambda ids: sums_so_far(ids) + ids.shape[1], IDS, tolerance=TIGHT)


def test_words_that_are_never_said_are_no_difference_and_nan_is():
    def forbidding(ids):
        logits = sums_so_far(ids)
        logits[..., 1] = -float("inf")
        return logits

    assert not looks_ahead(forbidding, IDS, tolerance=TIGHT)
    assert looks_ahead(lambda ids: sums_so_far(ids) * float("nan"), IDS, tolerance=TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_alone_is_no_looking_ahead(dtype):
    noise = torch.finfo(dtype).eps

    def rounded(ids):
        return sums_so_far(ids) * (1 + noise * (-1) ** ids.shape[1])

    assert not looks_ahead(rounded, IDS, tolerance=rounding_tolerance(dtype))
    assert looks_ahead(
        lambda ids: sums_so_far(ids) * (1 + 0.2 * (-1) ** ids.shape[1]),
        IDS,
        tolerance=rounding_tolerance(dtype),
    )
