"""Whose a text is: what a row may have as its user and its text, and a text with several owners, as
a mail to Bob is Bob's too."""

import difflib
import re
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import pyarrow as pa

from tightlip.core.errors import UsageError
from tightlip.corpus.conversations import format_of
from tightlip.corpus.formats import NOT_UTF8, Fault
from tightlip.corpus.prepare_config import TextSettings


class Writer(str):
    """The name of who wrote a document that is not theirs alone: it is its `others`' too.

    Wherever only its writer matters, it is that name; whatever stores documents keeps the others.

    >>> ann = Writer(["ann", "bob"])
    >>> ann == "ann", owners_of(ann), owners_of("ann")
    (True, ('ann', 'bob'), ('ann',))
    """

    others: tuple[str, ...]

    def __new__(cls, names: Sequence[str]) -> "Writer":
        writer = super().__new__(cls, names[0])
        writer.others = (*names[1:],)
        return writer

    def __getnewargs__(self) -> tuple[tuple[str, ...]]:  # type: ignore[override]
        return (owners_of(self),)


def owners_of(user: str) -> tuple[str, ...]:
    """All owners of a document, its writer first."""
    return (str(user), *(user.others if isinstance(user, Writer) else ()))


def has_co_owners(users: Sequence[str]) -> bool:
    """Whether somebody's document is not theirs alone."""
    return any(isinstance(user, Writer) for user in users)


def check_columns(where: str, schema: pa.Schema, columns: TextSettings) -> None:
    user_column, text_column = columns.user_column, columns.text_column
    of_chats = columns.format not in ("auto", "text")
    of_chats |= columns.format == "auto" and format_of(schema.names, text_column) is not None
    needed = [("user", user_column), *([] if of_chats else [("text", text_column)])]
    for role, name in needed:
        if name not in schema.names:
            raise UsageError(
                f"{where} has no column {name!r}. {columns_there(schema.names, name)} "
                f"Name it with --{role}-column."
            )
        if schema.names.count(name) > 1:
            raise UsageError(f"{where} has two columns {name!r}. Rename one of them.")
    if pa.types.is_floating(schema.field(user_column).type):
        raise _float_users(where, user_column)


def _float_users(where: str, column: str) -> UsageError:
    return UsageError(
        f"{where} has floating-point numbers in its user column {column!r}, and 12.0 or 1e16 name nobody safely. pandas "
        "turns an integer column with gaps into floats: use astype('Int64') or astype(str) before saving."
    )


def columns_there(names: Iterable[str], wanted: str = "", *, is_csv: bool = False) -> str:
    """Which columns there are, for whoever gave another name.

    Of CSV only how many: without a header the first line is somebody's text. Nor are names told
    that are none a column usually has: keys of JSON may be anything.
    """
    available = [str(there) for there in names]
    if is_csv:
        return f"It has {len(available)} columns, and its first line must name them."
    usual = [name for name in available if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}", name)]
    others = len(available) - len(usual)
    told = [*usual, *([f"{others} with names that may be text"] if others else [])]
    close = difflib.get_close_matches(wanted, usual, n=1)
    closest = f" Closest: {close[0]}." if close else ""
    return f"Columns there: {', '.join(told) or 'none'}.{closest}"


def user_fault(row: dict[str, Any], name: str, where: str, *, is_csv: bool) -> Fault | None:
    """What is wrong with a row's user, which becomes a plain string."""
    if row.get(name) is None:
        return _missing(name, row, is_csv)
    if isinstance(row[name], list | tuple):
        row[name] = _owners(row[name], name, where)
    if not isinstance(row[name], str | Fault):
        row[name] = _user(row[name], name, where)
    if isinstance(row[name], Fault):
        return row[name]
    if is_csv and not row[name]:
        return Fault(f"has nothing in column {name!r}")
    if is_csv and re.fullmatch(r"-?\d+\.0", row[name]):
        raise _float_users(where, name)  # CSV is all text
    return _not_utf8(row)


def text_fault(row: dict[str, Any], name: str, where: str, *, is_csv: bool) -> Fault | None:
    """The same of its text."""
    if row.get(name) is None:
        return _missing(name, row, is_csv)
    if not isinstance(row[name], str | Fault):
        row[name] = _text(row[name], name, where)
    return _not_utf8(row)


def _not_utf8(row: dict[str, Any]) -> Fault | None:
    bad = (
        value is NOT_UTF8 or (isinstance(value, str) and not _encodes(value))
        for value in row.values()
    )
    return NOT_UTF8 if any(bad) else None


def _missing(name: str, row: dict[str, Any], is_csv: bool) -> Fault:
    if name in row:
        return Fault(f"has null in column {name!r}")
    return Fault(f"has no column {name!r} ({columns_there(row, name, is_csv=is_csv)[:-1]})")


def _owners(values: Sequence[Any], column: str, where: str) -> str | Fault:
    """The writer of a text with its other owners, or what is wrong with the list of them."""
    if not values:
        return Fault(f"has an empty list of owners in column {column!r}")
    if any(value is None or value == "" for value in values):
        return Fault(f"has null or an empty name among the owners in column {column!r}")
    names = [each if isinstance(each, str) else _user(each, column, where) for each in values]
    if not all(map(_encodes, names)):
        return NOT_UTF8
    if len({*names}) < len(names):
        return Fault(f"names an owner twice in column {column!r}")
    return Writer(names) if names[1:] else names[0]


def _user(value: Any, column: str, where: str) -> str:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        raise _float_users(where, column)
    raise UsageError(
        f"{where} has a {type(value).__name__} in its user column {column!r}. Users are strings or integers, or lists of them."
    )


def _text(value: Any, column: str, where: str) -> str | Fault:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return NOT_UTF8
    raise UsageError(
        f"{where} has a {type(value).__name__} in its text column {column!r}. Texts are strings; "
        "is it another column? --text-column"
    )


def _encodes(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False
