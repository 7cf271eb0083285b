"""How a model is run over a text: what changes speed and memory, not what is found."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tightlip.core.settings import Settings, bytes_from, setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Which model is meant where a folder does not say it all, and how it is served."""

    panel: ClassVar[str | None] = "Model"

    base: str | None = setting(
        None,
        "The base of an adapter.",
        path="DIR",
        default_words="the folder that the adapter names",
    )
    adapter: str | None = setting(None, "Which adapter of a folder with several.")
    quantize: str | None = setting(
        None, "Read the model in few bits, as it will be served.", choices=("4bit", "8bit")
    )
    device_map: str | None = setting(
        None, "Spread a model over GPUs, memory and disk.", choices=("auto",)
    )
    begin: str = setting(
        "auto",
        "Whether the begin token stands before each text; auto: where the tokenizer puts it, and always for our own models.",
        choices=("auto", "always", "never"),
    )

    def of_others(self) -> Self:
        """How the public model and the reference are read: neither is the one that is served, and
        of an adapter each has its own base."""
        return replace(self, base=None, adapter=None, quantize=None)


@dataclass(frozen=True, kw_only=True)
class ScanOptions(ModelSettings):
    """What changes speed and memory, not the report (beyond float rounding)."""

    panel: ClassVar[str | None] = None

    device: str = setting("auto", "cpu, cuda, or auto: the GPU where there is one.")
    dtype: str = setting(
        "float32", "What the model computes in.", choices=("float32", "bfloat16", "float16")
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
    memory: str = setting(
        "4GB", "Most memory for counting, and for what is found before it goes to disk."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        bytes_from(self.memory)


@dataclass(frozen=True, kw_only=True)
class Decoding(Settings):
    """How a deployment draws the next token from the model's predictions, in this order."""

    panel: ClassVar[str | None] = "Decoding"

    temperature: float = setting(1.0, "Divides the logits: below 1 it is surer.", above=0)
    top_k: int | None = setting(
        None, "Draw among so many tokens, the likeliest; 1 is greedy.", at_least=1
    )
    top_p: float | None = setting(
        None, "Draw among the likeliest tokens that together have this share.", above=0, at_most=1
    )

    @property
    def nucleus(self) -> float | None:
        """The share of top-p; None where nothing is cut."""
        return None if self.top_p in (None, 1.0) else self.top_p
