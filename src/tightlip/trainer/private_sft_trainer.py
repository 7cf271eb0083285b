"""TRL's SFTTrainer, made private; apart, since not everybody has TRL."""

from importlib.util import find_spec

from tightlip.core.errors import UsageError
from tightlip.trainer.private_trainer import PrivateMixin

if find_spec("trl") is None:
    raise UsageError(
        "PrivateSFTTrainer needs TRL, which is missing. Run: pip install 'tightlip[trl]'"
    )

from trl import SFTTrainer


class PrivateSFTTrainer(PrivateMixin, SFTTrainer):
    """TRL's SFTTrainer with differential privacy; `PrivateMixin` says what its arguments are."""
