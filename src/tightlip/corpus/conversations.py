"""Rows as people keep them for fine-tuning, and the documents that a model was shown of them.

| format | columns |
|---|---|
| text | the text column |
| messages | `messages`, each with `role` and `content`; `tools` |
| prompt-completion | `prompt`, `completion`: texts, or lists of messages |
| preference | `chosen`, `rejected`, and perhaps `prompt`: two documents of a row |
| sharegpt | `conversations`, each with `from` and `value` |
| alpaca | `instruction`, `output`, and perhaps `input` and `system` |
| tokens | `input_ids`, and perhaps `labels` |
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from tightlip.corpus.formats import Fault

_READ_BESIDE = {"prompt", "tools", "input", "system", "labels", "attention_mask"}
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "assistant": "assistant", "model": "assistant", "system": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip

Message = dict[str, Any]
_THOUGHTS = ("reasoning_content", "thinking")  # which a template may leave out


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A row before a template makes a text of it.

    The first `num_prompt` messages led to the others, which alone were trained on where the row
    says prompt and completion. `weights` says of each message whether it was, where the row does.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    num_prompt: int | None = None
    weights: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """A row that is its own text; what stands before `prompt_end` led to the rest."""

    text: str
    prompt_end: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A row that is token ids already; labels of -100 were not trained on."""

    ids: list[int] = field(repr=False)
    labels: list[int] | None = field(default=None, repr=False)


Document = Conversation | PlainText | TokenRow


def format_of(columns: Any, text_column: str) -> str | None:
    """The format that these columns tell; None where they tell none."""
    names = {*columns}
    if text_column in names:
        return "text"
    return next((name for name, (_, told) in _FORMATS.items() if told and names >= told), None)


def columns_read(name: str, text_column: str) -> set[str]:
    """All columns that the text of a row of the format may come from."""
    return {text_column} if name == "text" else _FORMATS[name][1] | _READ_BESIDE


def documents_of(row: Mapping[str, Any], name: str, text_column: str) -> list[Document] | Fault:
    """The documents of a row of the format called `name`, or why it has none."""
    try:
        return list(_FORMATS[name][0](row, text_column))
    except _UnusableError as error:
        return Fault(str(error))


class _UnusableError(Exception):
    """Why a row cannot be read, in words that go on "row 3 ..."."""


def _text(row: Mapping[str, Any], text_column: str) -> Iterator[Document]:
    yield PlainText(text=_string(row, text_column))


def _messages(row: Mapping[str, Any], _: str) -> Iterator[Document]:
    messages = _message_list(row, "messages")
    weights = [message.pop("weight", None) for message in messages]
    if any(weight is not None and weight not in (0, 1) for weight in weights):
        raise _UnusableError("has a message whose weight is neither 0 nor 1")
    known = None if all(weight is None for weight in weights) else weights
    yield Conversation(
        messages=messages,
        tools=_tools(row),
        weights=known and [1 if weight is None else int(weight) for weight in known],
    )


def _prompt_completion(row: Mapping[str, Any], _: str) -> Iterator[Document]:
    yield _led_by_prompt(row, "completion")


def _preference(row: Mapping[str, Any], _: str) -> Iterator[Document]:
    for name in ("chosen", "rejected"):
        if row.get("prompt") is not None:
            yield _led_by_prompt(row, name)
        elif isinstance(row[name], str):
            yield PlainText(text=row[name])
        else:
            yield Conversation(messages=_message_list(row, name), tools=_tools(row))


def _led_by_prompt(row: Mapping[str, Any], completion: str) -> Document:
    first, then = row.get("prompt"), row.get(completion)
    if isinstance(first, str) and isinstance(then, str):
        return PlainText(text=first + then, prompt_end=len(first))
    led, rest = _message_list(row, "prompt"), _message_list(row, completion)
    return Conversation(messages=[*led, *rest], tools=_tools(row), num_prompt=len(led))


def _sharegpt(row: Mapping[str, Any], _: str) -> Iterator[Document]:
    messages = _system(row)
    for turn in _parsed_list(row, "conversations"):
        role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        content = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if role not in _SHAREGPT_ROLES or not isinstance(content, str):
            raise _UnusableError(
                "has a turn in 'conversations' without a known 'from' and a 'value'"
            )
        messages.append({"role": _SHAREGPT_ROLES[str(role)], "content": content})
    yield Conversation(messages=messages, tools=_tools(row))


def _alpaca(row: Mapping[str, Any], _: str) -> Iterator[Document]:
    asked = _string(row, "instruction")
    if row.get("input"):
        asked = f"{asked}\n\n{_string(row, 'input')}"
    messages = [*_system(row), {"role": "user", "content": asked}]
    answer = {"role": "assistant", "content": _string(row, "output")}
    yield Conversation(messages=[*messages, answer], num_prompt=len(messages))


def _tokens(row: Mapping[str, Any], _: str) -> Iterator[Document]:
    ids, labels = _whole_numbers(row, "input_ids"), None
    if row.get("labels") is not None:
        labels = _whole_numbers(row, "labels")
        if len(labels) != len(ids):
            raise _UnusableError(f"has {len(ids)} input_ids and {len(labels)} labels")
    if any(number < 0 for number in ids):
        raise _UnusableError("has an id below 0 in 'input_ids'")
    if row.get("attention_mask") is not None:  # padding is nobody's
        seen = _whole_numbers(row, "attention_mask")
        ids, labels = list(compress(ids, seen)), labels and list(compress(labels, seen))
    yield TokenRow(ids=ids, labels=labels)


# Who reads a format, and which columns tell it, the first that fits; the text column, whatever its
# name, comes before all of them.
_FORMATS: dict[str, tuple[Callable[[Mapping[str, Any], str], Iterator[Document]], set[str]]] = {
    "text": (_text, set()),
    "messages": (_messages, {"messages"}),
    "prompt-completion": (_prompt_completion, {"prompt", "completion"}),
    "preference": (_preference, {"chosen", "rejected"}),
    "sharegpt": (_sharegpt, {"conversations"}),
    "alpaca": (_alpaca, {"instruction", "output"}),
    "tokens": (_tokens, {"input_ids"}),
}


# Values of a row


def _string(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _UnusableError(f"has no text in column {name!r}")
    return value


def _system(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "system", "content": _string(row, "system")}] if row.get("system") else []


def _parsed_list(row: Mapping[str, Any], name: str) -> list[Any]:
    """A list; in CSV, and where a table has no lists, it stands as JSON."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not value:
        raise _UnusableError(f"has no list in column {name!r}")
    return value


def _message_list(row: Mapping[str, Any], name: str) -> list[Message]:
    messages = _parsed_list(row, name)
    if not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise _UnusableError(f"has a message in {name!r} without a role")
    # Arrow gives every message every key that any has.
    return [_without_nulls(message) for message in messages]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    return _without_nulls(_parsed_list(row, "tools")) if row.get("tools") else None


def _whole_numbers(row: Mapping[str, Any], name: str) -> list[int]:
    values = _parsed_list(row, name)
    if not all(type(value) is int for value in values):
        raise _UnusableError(f"has something else than whole numbers in {name!r}")
    return values


# Where the contents of messages stand in the text that a template made


def contents_of(message: Message) -> Iterator[str]:
    """The texts of a message, in their order: its content or the parts of it, what it thought, and
    what it called tools with."""
    for name in _THOUGHTS:
        if isinstance(message.get(name), str):
            yield message[name]
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def called_with(message: Message) -> Iterator[str]:
    """The texts in the arguments of a message's calls of tools; templates write them as they like."""
    waiting = [
        call.get("function", call).get("arguments")
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict) and isinstance(call.get("function", call), dict)
    ]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, str):
            yield value
        elif type(value) in (int, float):
            yield json.dumps(value)
        elif isinstance(value, dict | list):
            waiting[:0] = value.values() if isinstance(value, dict) else value


@dataclass(frozen=True)
class Place:
    """Characters [start, end) of a text are the content of the message of this number."""

    start: int
    end: int
    message: int


def places_of(messages: list[Message], text: str) -> list[Place] | None:
    """Where each message's content stands, in order; None where one is not there.

    A template may strip a content. One may also leave something out on purpose, as what a model
    thought in earlier turns: only contents must be found.
    """
    places: list[Place] = []
    end = 0
    for number, message in enumerate(messages):
        begin, thought = end, [message.get(name) for name in _THOUGHTS]
        for content in contents_of(message):
            looked_for = content if content in text else content.strip()
            start = text.find(looked_for, end) if looked_for else -1
            if start >= 0:
                end = start + len(looked_for)
                places.append(Place(start, end, number))
            elif looked_for and content not in thought:
                return None
        # Templates write calls before or behind the content, and as JSON or as they are.
        for argument in called_with(message):
            spelt = (argument, *(json.dumps(argument, ensure_ascii=a)[1:-1] for a in (False, True)))
            found = [(text.find(each, begin), each) for each in spelt if each in text[begin:]]
            for start, each in found[:1]:
                places.append(Place(start, start + len(each), number))
                end = max(end, start + len(each))
    return places
