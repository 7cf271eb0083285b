"""Chats and the like as token ids: of each token whose words it is, and whether it was trained on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.devices import begin_ids
from tightlip.core.errors import UsageError
from tightlip.corpus.conversations import Conversation, PlainText, TokenRow, places_of
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.prepare_config import TextSettings
from tightlip.corpus.readers import Corpus, RawDocument
from tightlip.corpus.rendering import Renderer, TemplateError
from tightlip.corpus.tables import DocumentBatch

# The first is of what no message says, the last of roles that have no usual name: a report without
# text must not tell what somebody wrote in a role's place.
ROLES = (
    *("template", "system", "developer", "user", "assistant", "model", "tool", "function"),
    *("prompt", "completion", "text", "other"),
)
# Which of a row's kinds know what each setting asks for.
_KNOWN_OF = {
    "completion": (PlainText, Conversation),
    "assistant": (Conversation,),
    "labels": (TokenRow,),
}
_ROWS_AT_ONCE = 500
SPOKEN = "spoken"
MOST_TEMPLATE_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RoleTokens:
    """A document's ids; of each token the number of its role, and whether it was trained on."""

    user: str
    content: bytes  # what the corpus' fingerprint is of
    spoken: str  # the text with line breaks in the place of what no message says
    ids: np.ndarray
    roles: np.ndarray
    trained: np.ndarray
    beside: dict[str, Any]  # the row's further columns


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What a model was shown of a row: the text, whose words stand where, and what was trained on."""

    text: str
    places: list[tuple[int, int, str]]
    trained: list[tuple[int, int]]


class RolesReader:
    """Makes documents with roles of a corpus' rows.

    Holds:
        whole: every character that a template wrote is in exactly one token's reach, or in none's.
        named: a row that the template does not take is an error with its place.
    """

    def __init__(self, tokenizer: Any, settings: TextSettings) -> None:
        self.role_names = list(ROLES)
        self.begins_itself = False  # as the first row tells: chats and tokens hold what begins them
        self._kind: type | None = None
        self._tokenizer, self._settings = tokenizer, settings
        self._encoder = Encoder(tokenizer, with_spans=True)

    def documents(self, corpus: Corpus) -> Iterator[RoleTokens]:
        settings, rows = self._settings, corpus.raw_documents()
        some = list(islice(rows, _ROWS_AT_ONCE))
        # Rows are of one kind, so the first tells whether there is anything to render.
        has_chats = any(isinstance(row.document, Conversation) for row in some[:1])
        with Renderer(
            template_of(self._tokenizer, settings) if has_chats else "",
            date=settings.template_date,
            values=dict(self._tokenizer.special_tokens_map),
        ) as self._renderer:
            while some:
                yield from self._of(some)
                some = list(islice(rows, _ROWS_AT_ONCE))

    def _of(self, rows: Iterable[RawDocument]) -> Iterator[RoleTokens]:
        shown = [self._shown(row) for row in rows]
        ids, spans = self._encoder.encode([one.text for one in shown if one is not None])
        assert spans is not None
        encoded = iter(zip(ids, spans, strict=True))
        for row, one in zip(rows, shown, strict=True):
            yield self._from_ids(row) if one is None else self._from_text(row, one, *next(encoded))

    def _shown(self, row: RawDocument) -> _Shown | None:
        self._check_kind(row)
        if isinstance(row.document, TokenRow):
            return None
        if isinstance(row.document, PlainText):
            text, end = row.document.text, row.document.prompt_end
            start = end or 0 if self._trains_completion(row, known=end is not None) else 0
            said = [(0, end or 0, "prompt"), (end or 0, len(text), "completion")]
            places = said if end is not None else [(0, len(text), "text")]
            return _Shown(text=text, places=places, trained=[(start, len(text))])
        return self._rendered(row, row.document)

    def _check_kind(self, row: RawDocument) -> None:
        """Refuse rows of two kinds, which begin differently, and a question that they do not answer."""
        kind, asked = type(row.document), self._settings.trained_on
        self._kind = self._kind or kind
        self.begins_itself = kind is not PlainText
        if kind is not self._kind:
            raise UsageError(
                f"{row.where} is of another kind than the rows before: texts and lists of messages do not mix. Write all alike."
            )
        if kind not in _KNOWN_OF.get(asked, (kind,)):
            raise UsageError(
                f"{row.where} does not tell what trained_on={asked!r} asks for. Use auto or all."
            )

    def _rendered(self, row: RawDocument, chat: Conversation) -> _Shown:
        try:
            text, generated = self._renderer.render(
                chat.messages, tools=chat.tools, generated=self._settings.trained_on == "assistant"
            )
            if (places := places_of(chat.messages, text)) is None:
                raise TemplateError("holds a message that the chat template leaves out or changes")
            trained = self._trained(row, chat, text, generated)
        except TemplateError as error:
            raise UsageError(
                f"{row.where} {error}. Give the template that it was trained with: --chat-template FILE"
            ) from error
        roles = [chat.messages[place.message]["role"] for place in places]
        if chat.weights is not None and self._settings.trained_on == "auto":
            trained = [(p.start, p.end) for p in places if chat.weights[p.message]]
        whose = [(p.start, p.end, role) for p, role in zip(places, roles, strict=True)]
        return _Shown(text=text, places=whose, trained=trained)

    def _trained(
        self, row: RawDocument, chat: Conversation, text: str, generated: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Which characters were trained on."""
        if self._settings.trained_on == "assistant":
            if not generated:
                raise TemplateError(
                    "is of a chat template that does not say where the assistant speaks ({% generation %})"
                )
            return [(start, end) for start, end in generated]
        if not self._trains_completion(row, known=chat.num_prompt is not None):
            return [(0, len(text))]
        led, _ = self._renderer.render(
            chat.messages[: chat.num_prompt], tools=chat.tools, add_generation_prompt=True
        )
        if not text.startswith(led):  # a template may treat the last turn apart
            places = places_of(chat.messages, text) or []
            starts = [p.start for p in places if p.message >= (chat.num_prompt or 0)]
            return [(min(starts, default=len(text)), len(text))]
        return [(len(led), len(text))]

    def _trains_completion(self, row: RawDocument, *, known: bool) -> bool:
        """Whether only the completion was trained on; refused where that is asked for and not `known`."""
        asked = self._settings.trained_on
        if asked == "completion" and not known:
            raise UsageError(
                f"{row.where} has no completion of its own, and trained_on={asked!r} asks for it. Use auto or all."
            )
        return known and asked in ("auto", "completion")

    def _from_text(
        self, row: RawDocument, shown: _Shown, ids: np.ndarray, spans: np.ndarray
    ) -> RoleTokens:
        roles = np.zeros(len(ids), np.int8)
        for start, end, role in shown.places:
            roles[_overlap(spans, start, end)] = self._number(role)
        trained = np.zeros(len(ids), np.int8)
        for start, end in shown.trained:
            trained[_overlap(spans, start, end)] = 1
        content, spoken = shown.text.encode("utf-8"), _spoken(shown)
        return self._made(row, content, spoken, ids=ids, roles=roles, trained=trained)

    def _from_ids(self, row: RawDocument) -> RoleTokens:
        assert isinstance(row.document, TokenRow)
        ids = np.array(row.document.ids, np.int32)
        labels = row.document.labels
        asked = self._settings.trained_on
        if asked == "labels" and labels is None:
            raise UsageError(f"{row.where} has no labels, and trained_on='labels' asks for them.")
        trained = np.ones(len(ids), np.int8)
        if labels is not None and asked in ("auto", "labels"):
            trained = (np.array(labels) != -100).astype(np.int8)
        special = np.array(sorted(self._tokenizer.all_special_ids), np.int64)
        roles = np.where(np.isin(ids, special), 0, self._number("text")).astype(np.int8)
        return self._made(row, ids.tobytes(), "", ids=ids, roles=roles, trained=trained)

    def _made(
        self, row: RawDocument, content: bytes, spoken: str, **arrays: np.ndarray
    ) -> RoleTokens:
        if self._settings.max_length is not None:
            num_before = 0 if self.begins_itself else len(begin_ids(self._tokenizer))
            arrays["trained"][max(0, self._settings.max_length - num_before) :] = 0
        return RoleTokens(
            user=row.user, content=content, spoken=spoken, beside=row.beside, **arrays
        )

    def _number(self, role: str) -> int:
        return ROLES.index(role if role in ROLES[1:] else "other")


@dataclass(frozen=True)
class ShownTexts:
    """A corpus of chats as the texts that its template makes of them; beside each, as long as it,
    what was spoken in it: the template's own words are nobody's."""

    corpus: Corpus
    tokenizer: Any
    settings: TextSettings

    def batches(self) -> Iterator[DocumentBatch]:
        shown = RolesReader(self.tokenizer, self.settings).documents(self.corpus)
        while some := list(islice(shown, _ROWS_AT_ONCE)):
            yield DocumentBatch(
                users=[one.user for one in some],
                texts=[one.content.decode("utf-8") for one in some],
                attributes={SPOKEN: [one.spoken for one in some]},
            )


def _spoken(shown: _Shown) -> str:
    said = np.zeros(len(shown.text), bool)
    for start, end, _ in shown.places:
        said[start:end] = True
    return "".join(c if kept else "\n" for c, kept in zip(shown.text, said, strict=True))


def _overlap(spans: np.ndarray, start: int, end: int) -> np.ndarray:
    """Which tokens have a character of [start, end)."""
    return (spans[:, 0] < end) & (spans[:, 1] > start) & (spans[:, 0] < spans[:, 1])


def template_of(tokenizer: Any, settings: TextSettings) -> str:
    """The chat template that is given, or the tokenizer's own."""
    if settings.chat_template is not None:
        path = Path(settings.chat_template)
        if not path.is_file() or path.stat().st_size > MOST_TEMPLATE_BYTES:
            raise UsageError(
                f"{path} is not a file of at most {MOST_TEMPLATE_BYTES:,} bytes, as a chat template is. Give the path of one."
            )
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path} cannot be read ({type(error).__name__}). Give the path of a chat template."
            ) from error
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("default")
    if not isinstance(own, str):
        raise UsageError(
            "The corpus holds chats, and the tokenizer has no chat template to make a text of them. Give the one that the "
            "model was trained with: --chat-template FILE"
        )
    return own
