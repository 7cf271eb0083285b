"""What shape a model has, checked before a single weight is made.

Every constructor is written out: transformers turns a configuration class without its
own `__init__` into a keyword-only dataclass, and `LSTMConfig(10_000, 128, 128)` would fail.
Beside the shape each takes `use_cache`, `tie_word_embeddings` and the ids of special tokens by name.
"""

from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from tightlip.core.errors import UsageError

WORD_ENCODERS = ("lstm", "bag")
SIZES = (
    *("vocab_size", "embedding_size", "hidden_size", "intermediate_size"),
    *("num_layers", "num_heads", "max_position_embeddings"),
)
# Set after transformers' own constructor has run, so that none of its defaults wins.
SET_LAST: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


class RecurrentConfig(PreTrainedConfig):
    """The shape of an LSTM or GRU language model.

    Dropout acts on the embeddings, between layers and on the last layer's output.

    Holds:
        positive_sizes: a size below one is a usage error.
        equal_sizes_when_tied: tying needs embedding_size == hidden_size.
    """

    is_recurrent: ClassVar[bool] = True
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "num_layers"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 10_000,
        embedding_size: int = 128,
        hidden_size: int = 128,
        num_layers: int = 2,
        dropout: float = 0.0,
        **others: Any,
    ) -> None:
        fill(locals(), use_cache=others.pop("use_cache", True))
        if self.tie_word_embeddings and embedding_size != hidden_size:
            raise UsageError(
                f"tie_word_embeddings=True with embedding_size={embedding_size} and hidden_size={hidden_size}: one matrix "
                "cannot serve both ends when the sizes differ. Make the sizes equal or leave the weights untied."
            )


class LSTMConfig(RecurrentConfig):
    """The shape of an LSTM language model."""

    model_type = "tightlip_lstm"
    __init__ = RecurrentConfig.__init__


class GRUConfig(RecurrentConfig):
    """The shape of a GRU language model."""

    model_type = "tightlip_gru"
    __init__ = RecurrentConfig.__init__


class TransformerConfig(PreTrainedConfig):
    """The shape of a decoder-only Transformer with learned positions.

    `intermediate_size` is four times `hidden_size` unless given. Dropout acts on the
    embeddings and on what each attention and feed-forward block adds.

    Holds:
        positive_sizes: a size below one is a usage error.
        whole_heads: hidden_size must be a multiple of num_heads.
    """

    model_type = "tightlip_transformer"
    is_recurrent: ClassVar[bool] = False
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 10_000,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        max_position_embeddings: int = 512,
        intermediate_size: int | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> None:
        if intermediate_size is None:
            intermediate_size = 4 * hidden_size
        fill(locals(), use_cache=others.pop("use_cache", True))
        if hidden_size % num_heads:
            raise UsageError(
                f"hidden_size={hidden_size} cannot be shared evenly by num_heads={num_heads}. "
                f"Use a hidden_size that is a multiple of {num_heads}, such as {hidden_size - hidden_size % num_heads + num_heads}."
            )


class WordEncoderConfig(PreTrainedConfig):
    """The shape of a small encoder: `kind` is lstm or bag, `hidden_size` the width it gives out.

    Holds:
        positive_sizes: a size below one is a usage error.
        equal_sizes_in_a_bag: a bag gives out its embeddings, so both sizes are one.
    """

    model_type = "tightlip_word_encoder"

    def __init__(
        self,
        kind: str = "lstm",
        vocab_size: int = 10_000,
        embedding_size: int | None = None,
        hidden_size: int = 128,
        dropout: float = 0.0,
        pad_token_id: int | None = 0,
        **others: Any,
    ) -> None:
        embedding_size = hidden_size if embedding_size is None else embedding_size
        others |= {**SET_LAST, "pad_token_id": pad_token_id}
        fill(locals(), kind=kind)
        if kind not in WORD_ENCODERS:
            raise UsageError(f"Unknown encoder {kind!r}. Available: {', '.join(WORD_ENCODERS)}.")
        if kind == "bag" and embedding_size != hidden_size:
            raise UsageError(
                f"embedding_size={embedding_size} with hidden_size={hidden_size}: a bag gives out its embeddings as "
                "they are. Make the sizes equal, or leave embedding_size out."
            )


def fill(given: dict[str, Any], **settings: Any) -> None:
    """Check and set what every configuration has: sizes, dropout, ids of special tokens, tying.
    `given` are the arguments of its constructor by name, and `settings` what else it has.

    A configuration is what an Auto class looks a model up by, so the moment one exists
    is the last moment at which our models must be known. Registering them earlier would
    make everyone who only wants a tokenizer wait for transformers' modelling code.
    """
    from tightlip.models import register_models

    config, dropout, others = given["self"], given["dropout"], given["others"]
    sizes = {name: given[name] for name in SIZES if name in given}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                f"{name}={size!r} is not a size: it must be a whole number of at least 1. Use {name}=1 or more."
            )
    if not 0.0 <= dropout < 1.0:
        raise UsageError(
            f"dropout={dropout} is not a share that leaves anything over. Use a dropout of at least 0 and below 1."
        )
    last = {name: others.pop(name, default) for name, default in SET_LAST.items()}
    _set(config, {**sizes, "dropout": dropout, **settings})
    PreTrainedConfig.__init__(config, **others)
    _set(config, last)
    register_models()


def _set(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)
