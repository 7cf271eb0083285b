import pytest
import torch

from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def test_a_device_that_works_keeps_its_name():
    assert usable_device("cpu") == "cpu"
    assert usable_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("quantum", "Unknown device 'quantum'"),
        pytest.param("cuda", "needs a GPU", marks=no_gpu),
        pytest.param("cuda:3", "needs a GPU", marks=no_gpu),
    ],
)
def test_a_device_that_cannot_be_used_is_named_with_what_to_use(name, because):
    with pytest.raises(UsageError, match=because) as refused:
        usable_device(name)
    assert "auto" in str(refused.value)


def test_bfloat16_is_refused_on_the_cpu():
    with pytest.raises(UsageError, match="bf16=True is for GPUs"):
        usable_device("cpu", bf16=True)
