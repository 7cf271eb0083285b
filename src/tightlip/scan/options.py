"""How a model is run over a text: what changes speed and memory, not what is found."""

from dataclasses import dataclass

from tightlip.core.settings import Settings, bytes_from, setting


@dataclass(frozen=True, kw_only=True)
class ScanOptions(Settings):
    """What changes speed and memory, not the report (beyond float rounding)."""

    device: str = setting("auto", "cpu, cuda, or auto: the GPU where there is one.")
    dtype: str = setting(
        "float32",
        "What the model computes in.",
        choices=("float32", "bfloat16", "float16"),
    )
    window: int | None = setting(
        None,
        "Most tokens shown to the model at once.",
        at_least=2,
        default_words="as many as the model has positions",
    )
    batch_tokens: int | None = setting(
        None,
        "Tokens per batch of the scan.",
        at_least=1,
        default_words="16,384 on the CPU, 65,536 on a GPU",
    )
    memory: str = setting("4GB", "Most memory the counting may take.")

    def __post_init__(self) -> None:
        super().__post_init__()
        bytes_from(self.memory)
