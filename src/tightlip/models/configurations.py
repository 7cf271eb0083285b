"""What shape a model has, checked before a single weight is made.

Every constructor is written out: transformers turns a configuration class without its
own `__init__` into a keyword-only dataclass, and `LSTMConfig(10_000, 128, 128)` would fail.
"""

from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from tightlip.core.errors import UsageError

WORD_ENCODERS = ("lstm", "bag")


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
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **others: Any,
    ) -> None:
        check_sizes(
            vocab_size=vocab_size,
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
        )
        check_dropout(dropout)
        check_tying(tie_word_embeddings, embedding_size, hidden_size)
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.dropout = dropout
        self.use_cache = use_cache
        super().__init__(**others)
        set_tokens_and_tying(self, bos_token_id, eos_token_id, pad_token_id, tie_word_embeddings)


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
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **others: Any,
    ) -> None:
        if intermediate_size is None:
            intermediate_size = 4 * hidden_size
        check_sizes(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            max_position_embeddings=max_position_embeddings,
            intermediate_size=intermediate_size,
        )
        check_dropout(dropout)
        check_heads(hidden_size, num_heads)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.max_position_embeddings = max_position_embeddings
        self.intermediate_size = intermediate_size
        self.dropout = dropout
        self.use_cache = use_cache
        super().__init__(**others)
        set_tokens_and_tying(self, bos_token_id, eos_token_id, pad_token_id, tie_word_embeddings)


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
        check_sizes(vocab_size=vocab_size, embedding_size=embedding_size, hidden_size=hidden_size)
        check_dropout(dropout)
        if kind not in WORD_ENCODERS:
            raise UsageError(f"Unknown encoder {kind!r}. Available: {', '.join(WORD_ENCODERS)}.")
        if kind == "bag" and embedding_size != hidden_size:
            raise UsageError(
                f"embedding_size={embedding_size} with hidden_size={hidden_size}: a bag gives out its embeddings as "
                "they are. Make the sizes equal, or leave embedding_size out."
            )
        self.kind = kind
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        self.hidden_size = hidden_size
        self.dropout = dropout
        super().__init__(**others)
        set_tokens_and_tying(self, None, None, pad_token_id, False)


def set_tokens_and_tying(
    config: PreTrainedConfig,
    bos_token_id: int | None,
    eos_token_id: int | list[int] | None,
    pad_token_id: int | None,
    tie_word_embeddings: bool,
) -> None:
    """What every configuration ends with; set last, so that no base default wins.

    A configuration is what an Auto class looks a model up by, so the moment one exists
    is the last moment at which our models must be known. Registering them earlier would
    make everyone who only wants a tokenizer wait for transformers' modelling code.
    """
    from tightlip.models.registration import register_models

    config.bos_token_id = bos_token_id
    config.eos_token_id = eos_token_id
    config.pad_token_id = pad_token_id
    config.tie_word_embeddings = tie_word_embeddings
    register_models()


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                f"{name}={size!r} is not a size: it must be a whole number of at least 1. Use {name}=1 or more."
            )


def check_dropout(dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise UsageError(
            f"dropout={dropout} is not a share that leaves anything over. Use a dropout of at least 0 and below 1."
        )


def check_tying(tie_word_embeddings: bool, embedding_size: int, hidden_size: int) -> None:
    if tie_word_embeddings and embedding_size != hidden_size:
        raise UsageError(
            f"tie_word_embeddings=True with embedding_size={embedding_size} and hidden_size={hidden_size}: one matrix "
            "cannot serve both ends when the sizes differ. Make the sizes equal or leave the weights untied."
        )


def check_heads(hidden_size: int, num_heads: int) -> None:
    if hidden_size % num_heads:
        raise UsageError(
            f"hidden_size={hidden_size} cannot be shared evenly by num_heads={num_heads}. "
            f"Use a hidden_size that is a multiple of {num_heads}, such as {hidden_size - hidden_size % num_heads + num_heads}."
        )
