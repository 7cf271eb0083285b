"""From texts to raw vectors: an encoder, its tokenizer and a pooling.

An extractor is what runs on a user's device before any noise. Shapes: B texts, T positions,
K dimensions of the vector.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.registry import unknown
from tightlip.corpus.vocabulary import word_splitter
from tightlip.models.checks import check_room
from tightlip.models.configurations import WORD_ENCODERS, WordEncoderConfig
from tightlip.models.encoders import WordEncoder, load_encoder, most_tokens
from tightlip.models.loading import load_tokenizer
from tightlip.vectors.settings import NEW_VOCABULARY, POOLINGS, EncodingOptions

DEFAULT_TOKENS = 128
NEW_DIMENSIONS = 64
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[MASK]"]
_AT_ONCE = 4096  # texts sorted by length together
# Encoders whose attention takes a mask of four dimensions as it is.
_TAKE_WIDE_MASKS = ("bert", "roberta", "xlm-roberta")
_TOGETHER = 1024  # texts masked and tokenised together
_AHEAD = 8  # batches made while a model works on others
_ON_THE_WAY = 2  # batches a GPU is given before the first is fetched

T = TypeVar("T")
# The texts at some places as they are read, with words masked for instance.
Reader = Callable[[np.ndarray], list[str]] | None


class Raw(NamedTuple):
    """Raw vectors on their way: whose they are, and a call that waits for them."""

    places: np.ndarray
    arrived: Callable[[], np.ndarray]


class Tokenised:
    """What every extractor does around its model: texts to rows of ids, rows to batches, and batches
    to vectors in the texts' order."""

    tokenizer: Any
    max_tokens: int
    dimensions: int

    @property
    def mask_word(self) -> str:
        """What stands in a text for a word taken out of it."""
        return str(self.tokenizer.mask_token or self.tokenizer.unk_token)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text's ids, special ones included, at most `max_tokens` of them."""
        if not texts:
            return []
        return self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        ).input_ids

    def padded(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Rows of ids as `input_ids` and `attention_mask`, padded on the right."""
        lengths_B = np.fromiter(map(len, rows), np.int64, len(rows))
        real_BT = np.arange(max(1, lengths_B.max(initial=1))) < lengths_B[:, None]
        ids_BT = np.full(real_BT.shape, self.tokenizer.pad_token_id or 0, np.int64)
        ids_BT[real_BT] = np.fromiter(chain.from_iterable(rows), np.int64, lengths_B.sum())
        mask_BT = real_BT.astype(np.int64)
        # A model asked about no token at all answers with nothing, or not a number.
        mask_BT[:, 0] = 1
        return {"input_ids": torch.from_numpy(ids_BT), "attention_mask": torch.from_numpy(mask_BT)}

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """What `forward` takes, for these texts."""
        return self.padded(self.token_ids(texts))

    def batches(
        self, texts: Sequence[str], batch_size: int, prepared: Reader = None
    ) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        """Batches of texts of like length, each with the places its texts came from.

        `prepared` gives the texts at some places as they are read, with words masked for
        instance; each place is asked for once.
        """
        for places in _windows(texts, batch_size):
            chosen = [texts[place] for place in places] if prepared is None else prepared(places)
            rows = self.token_ids(chosen)
            order = np.argsort([-len(row) for row in rows], kind="stable")
            for numbers in pieces(order, batch_size):
                yield places[numbers], self.padded([rows[number] for number in numbers])

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = EncodingOptions.batch_size,
        device: str | torch.device | None = None,
    ) -> np.ndarray:
        """The raw vectors of `texts`, float32, in their order."""
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        coming = self.stream(texts, batch_size=batch_size, device=device)
        pending = deque(islice(coming, _ON_THE_WAY))
        while pending:
            pending.extend(islice(coming, 1))
            raw = pending.popleft()
            vectors[raw.places] = raw.arrived()
        return vectors

    def stream(
        self, texts: Sequence[str], *, batch_size: int, device: Any = None, prepared: Reader = None
    ) -> Iterator[Raw]:
        """Raw vectors batch by batch.

        The next texts are tokenised meanwhile, and nothing waits for the model but `arrived`.
        """
        batches = self.batches(texts, batch_size, prepared)

        def made() -> tuple[np.ndarray | None, dict[str, Tensor]]:
            places, batch = next(batches, (None, {}))
            return places, self._made_ready(batch)

        for places, batch in made_ahead(repeat(made), _AHEAD):
            if places is None:
                break
            yield Raw(places, self._arriving(batch))

    def _made_ready(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def _arriving(self, batch: dict[str, Tensor]) -> Callable[[], np.ndarray]:
        """A call that waits for the raw vectors of a batch."""
        raise NotImplementedError


def _windows(texts: Sequence[str], batch_size: int) -> Iterator[np.ndarray]:
    """Places of texts to tokenise together, the longest first; by letters, which cost nothing.

    Few at first, so that the model starts soon, then twice as many each time: the more are sorted
    by their tokens, the less is padding. No more than are masked before a GPU has run out of work.
    """
    size = batch_size
    for start in range(0, len(texts), _AT_ONCE):
        letters = [-len(text) for text in texts[start : start + _AT_ONCE]]
        order = start + np.argsort(letters, kind="stable")
        while len(order):
            yield order[:size]
            order = order[size:]
            size = max(batch_size, min(2 * size, _TOGETHER // batch_size * batch_size))


class Extractor(Tokenised, nn.Module):
    """Texts in, one raw vector each out; the same on every device half.

    Holds:
        batching: a text's vector does not depend on the texts beside it.
        window: what stands beyond `max_tokens` changes nothing.
        empty: the empty text has a vector too.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, kind: str, pooling: str, max_tokens: int
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise UsageError(unknown("pooling", pooling, list(POOLINGS)))
        if pooling == "cls" and (kind == "bag" or tokenizer.cls_token_id is None):
            raise UsageError(
                "pooling='cls' takes the vector of the first token, and there is none that knows the rest of the text. "
                "Use --pooling mean."
            )
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        self.model, self.tokenizer = model, tokenizer
        self.kind, self.pooling, self.max_tokens = kind, pooling, max_tokens
        self.dimensions = int(model.config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = self._wide(attention_mask) if attention_mask.is_cuda else attention_mask
        hidden_BTK = self.model(input_ids=input_ids, attention_mask=seen).last_hidden_state
        if self.pooling == "cls":
            return hidden_BTK[:, 0]
        real_BT1 = attention_mask[..., None].to(hidden_BTK.dtype)
        return (hidden_BTK * real_BT1).sum(dim=1) / real_BT1.sum(dim=1).clamp(min=1)

    def _wide(self, attention_mask: Tensor) -> Tensor:
        """The same mask in the shape attention adds it; of one of two dimensions, transformers asks
        whether all of it is real, and waits until the GPU has done everything before."""
        config = self.model.config
        plain = config.model_type not in _TAKE_WIDE_MASKS or config._attn_implementation != "sdpa"
        return attention_mask if plain else attention_mask[:, None, None, :].bool()

    def stream(self, texts: Sequence[str], *, device: Any = None, **given: Any) -> Iterator[Raw]:
        """Raw vectors batch by batch; on a GPU they are still being computed when they come."""
        if device is not None:
            self.to(device)
        was_training = self.training
        self.eval()
        try:
            yield from super().stream(texts, **given)
        finally:
            self.train(was_training)

    def _made_ready(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return pinned(batch, self.model.device)

    @torch.inference_mode()
    def _arriving(self, batch: dict[str, Tensor]) -> Callable[[], np.ndarray]:
        where = self.model.device
        vectors = self(**to_device(batch, where)).float()
        if where.type != "cuda":
            return vectors.cpu().numpy
        host = torch.empty(vectors.shape, pin_memory=True)
        host.copy_(vectors, non_blocking=True)
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(where))
        return lambda: (there.synchronize(), host.numpy())[1]


def made_ahead(calls: Iterator[Callable[[], T]], num_ahead: int) -> Iterator[T]:
    """What the calls give, in order, made on a thread while those before are worked on."""
    with ThreadPoolExecutor(1) as maker:
        coming = deque(maker.submit(call) for call in islice(calls, num_ahead))
        try:
            while coming:
                coming.extend(maker.submit(call) for call in islice(calls, 1))
                yield coming.popleft().result()
        finally:
            for each in coming:
                each.cancel()


def pieces(values: np.ndarray, size: int) -> list[np.ndarray]:
    """An array in pieces of this size, the last one shorter."""
    return np.split(values, range(size, len(values), size))


def pinned(batch: dict[str, Tensor], where: Any) -> dict[str, Tensor]:
    """The batch in memory from which a GPU copies by itself; where there is none, as it is."""
    if torch.device(where).type != "cuda":
        return batch
    return {name: tensor.pin_memory() for name, tensor in batch.items()}


def to_device(batch: dict[str, Tensor], device: Any) -> dict[str, Tensor]:
    """The batch where the model is; to a GPU without waiting for the copy, if it was pinned."""
    if torch.device(device).type == "cpu":
        return batch
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def make_extractor(
    spec: str | Path,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    max_tokens: int | None = None,
    dimensions: int | None = None,
    vocabulary_size: int = NEW_VOCABULARY,
) -> Extractor:
    """The extractor that `spec` names: lstm or bag, new and with the words of `texts`, or a folder.

    New weights are drawn from torch's global generator: seed it first.
    """
    if str(spec) in WORD_ENCODERS:
        kind, tokenizer = str(spec), learnt_tokenizer(texts, vocabulary_size)
        size, length = dimensions or NEW_DIMENSIONS, max_tokens or DEFAULT_TOKENS
        shape = WordEncoderConfig(kind, len(tokenizer), hidden_size=size, dropout=0.1)
        check_room(WordEncoder, shape)
        model = WordEncoder(shape)
        return Extractor(model, tokenizer, kind=kind, pooling=pooling or "mean", max_tokens=length)
    folder = checked_folder(spec)
    if dimensions is not None:
        raise UsageError(
            f"dimensions={dimensions} shapes a new extractor, and {folder} has a shape of its own. Leave it out."
        )
    if (folder / "device.json").is_file():  # going on with an extractor of ours
        about = read_json(folder / "device.json")
        return open_extractor(
            folder / "extractor",
            kind=about["extractor"],
            pooling=pooling or about["pooling"],
            max_tokens=max_tokens or about["max_tokens"],
        )
    pooling = pooling or sentence_pooling(folder) or "cls"
    return open_extractor(folder, kind="hf", pooling=pooling, max_tokens=max_tokens)


def checked_folder(spec: str | Path) -> Path:
    """The folder that `spec` names; what is neither a folder nor an extractor of ours is refused."""
    if not Path(spec).is_dir():
        described = unknown("extractor", str(spec), list(WORD_ENCODERS))
        raise UsageError(f"{described} Or give the folder of a Hugging Face encoder.")
    return Path(spec)


def open_extractor(folder: Path, *, kind: str, pooling: str, max_tokens: int | None) -> Extractor:
    """The extractor whose encoder and tokenizer stand in `folder`."""
    model, tokenizer = load_encoder(folder), load_tokenizer(folder)
    if tokenizer.mask_token is None and tokenizer.unk_token is None:
        raise UsageError(
            f"The tokenizer in {folder} has neither a mask token nor an unknown token, so no word can be taken out of "
            "a text. Give an encoder trained with a mask, such as BERT or RoBERTa."
        )
    limit = int(min(most_tokens(model) or DEFAULT_TOKENS * 1000, tokenizer.model_max_length))
    if max_tokens is not None and max_tokens > limit:
        raise UsageError(
            f"max_tokens={max_tokens} is more than the {limit} that {folder} reads. Use {limit} or less."
        )
    max_tokens = max_tokens or min(DEFAULT_TOKENS, limit)
    return Extractor(model, tokenizer, kind=kind, pooling=pooling, max_tokens=max_tokens)


def sentence_pooling(folder: Path) -> str | None:
    """How sentence-transformers pools this encoder, where the folder says so."""
    path = folder / "1_Pooling" / "config.json"
    config = read_json(path) if path.is_file() else {}
    modes = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    return next((pooling for mode, pooling in modes.items() if config.get(mode)), None)


def learnt_tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the most frequent words of `texts`, in lower case, with a mask and a start."""
    if size <= len(SPECIAL_TOKENS):
        raise UsageError(
            f"vocabulary_size={size} leaves no room beside {len(SPECIAL_TOKENS)} special tokens. Use 1000 or more."
        )
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = word_splitter()
    # A word that stands once teaches nothing; as [UNK] it teaches what a rare word means.
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, min_frequency=2, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", SPECIAL_TOKENS.index("[CLS]"))]
    )
    names = ("pad_token", "unk_token", "cls_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **dict(zip(names, SPECIAL_TOKENS, strict=True)),
    )
