"""Settings written once: name, default, range, help and flag; read from TOML, flags and Python."""

import dataclasses
import inspect
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import wraps
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, Self, TypeVar

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError, with_arguments
from tightlip.core.files import refuse_store
from tightlip.core.registry import unknown
from tightlip.core.stores import copied

Call = TypeVar("Call", bound=Callable[..., Any])
_HOLDS = {"at_least": ge, "above": gt, "below": lt, "at_most": le}
# Of every whole number: libraries take no larger seed, and nobody waits for more steps.
LARGEST = 2**32 - 1
LARGEST_SIZE = 65_536  # of a layer
# Arguments that may be on an object store and are then copied, and such as may not be there.
_COPIED = {"model", "models", "public_model", "reference", "base", "against", "tokenizer", "report"}
_STAY_HERE = {"out", "key", "run", "runs", "prepared", "people"}
_IN_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list",
    dict: "a table",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What is to be known of a setting beyond its name, type and default.

    `default_words` says what None stands for. `flag` is its spelling on the command line where
    the name itself will not do, `parse` reads it from there, and a hidden flag works but is not
    listed. `panel` is the title it is listed under, where that is not its class' own. `path` says
    of what that must exist it is the path, in the word of the help: CORPUS, MODEL.
    """

    help: str
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    default_words: str | None = None
    flag: str | None = None
    path: str | None = None
    parse: Callable[[str], Any] | None = None
    panel: str | None = None
    hidden: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse what is not among the choices or is out of range; None is nothing and passes."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise UsageError(unknown(name, value, list(self.choices)))
        for number in value if isinstance(value, tuple) else (value,):
            _check_number(name, number)
        bounds = {word: bound for word in _HOLDS if (bound := getattr(self, word)) is not None}
        if not all(_HOLDS[word](value, bound) for word, bound in bounds.items()):
            words = " and ".join(f"{w.replace('_', ' ')} {bound}" for w, bound in bounds.items())
            raise UsageError(f"{name}={value:g} is out of range. It must be {words}.")


def _check_number(name: str, number: Any) -> None:
    """Refuse what no setting can mean, before anyone counts to it or makes room for it."""
    if isinstance(number, float) and not math.isfinite(number):
        raise UsageError(f"{name}={number} is out of range. It must be a finite number.")
    if isinstance(number, int) and abs(number) > LARGEST:
        raise UsageError(
            f"{name}={Decimal(number):.3g} is out of range. It must be at most {LARGEST:,}."
        )


def setting(default: Any, help: str, **about: Any) -> Any:
    """A field of a `Settings` dataclass; `...` as its default means that it must be given."""
    default = dataclasses.MISSING if default is ... else default
    return dataclasses.field(default=default, metadata={"about": About(help=help, **about)})


def about(field: dataclasses.Field) -> About:
    told: About = field.metadata.get("about", About(help=""))
    return told


class Settings:
    """A frozen dataclass of `setting`s that a table of a TOML file can spell.

    `panel` is the title under which a command lists the settings written in the class.
    """

    panel: typing.ClassVar[str | None] = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in settings_of(type(self)):
            value = _typed(field.name, getattr(self, field.name), hints[field.name])
            choices = choices_of(field, hints[field.name])
            dataclasses.replace(about(field), choices=choices).check(field.name, value)
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_tree(cls, tree: dict[str, Any], where: str) -> Self:
        """The settings in a table of the file at `where`; an unknown name is refused with the closest."""
        check_names(cls, tree, where)
        return cls(**tree)

    def tree(self) -> dict[str, Any]:
        """The settings that have a value, as TOML can hold them."""
        values = {field.name: getattr(self, field.name) for field in settings_of(type(self))}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and value != ()
        }


def settings_of(kind: type) -> list[dataclasses.Field]:
    """The fields of `kind` that were written with `setting`."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return [field for field in fields if "about" in field.metadata]


def panel_of(kind: type[Settings], field: dataclasses.Field) -> str | None:
    """The setting's own panel, or that of the class it is written in."""
    written_in = next(each for each in kind.__mro__ if field.name in inspect.get_annotations(each))
    return about(field).panel or written_in.panel  # type: ignore[attr-defined]


def names_in(*kinds: type[Settings]) -> list[str]:
    return [field.name for kind in kinds for field in settings_of(kind)]


def check_names(kind: type[Settings], tree: Mapping[str, Any], where: str) -> None:
    """Refuse what is not a table, and a name in it that is not a setting."""
    place, known = f"{where}: " if where else "", names_in(kind)
    if not isinstance(tree, Mapping):
        raise UsageError(f"{place}{tree!r} is not a table. Write one name = value per line.")
    _check_known("setting", tree, known, place)


def split_settings(given: dict[str, Any], *kinds: type[Settings]) -> list[Any]:
    """One object of each kind, from settings given by name; a name of none of them is refused."""
    _check_known("setting", given, names_in(*kinds))
    return [kind(**{n: given[n] for n in names_in(kind) if n in given}) for kind in kinds]


def _check_known(what: str, given: Iterable[str], known: list[str], place: str = "") -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{place}{unknown(what, name, known)}")


def takes(
    *kinds: type, tables: Collection[str] = (), sends: bool = False
) -> Callable[[Call], Call]:
    """Tell of a function for Python what it takes: its own arguments and the settings of `kinds`.

    In its signature the settings stand in the place of `**settings`, and its docstring ends with a
    line for each, so help() and editors show them. Of two of one name the function's own, or the
    first, counts. A name that is none of them is refused with the closest; `tables` are names of
    tables, as a file spells settings. A model or a report on an object store is given as its local
    copy. An `out` there is refused, unless the call `sends` what it writes.

        @takes(LeakageConfig, ScanOptions, TextSettings)
        def audit(model: Any, corpus: Any = None, **settings: Any) -> LeakageReport: ...
    """

    def made(call: Call) -> Call:
        signature = inspect.signature(call)
        own = signature.parameters.items()
        parameters = {name: each for name, each in own if each.kind != each.VAR_KEYWORD}
        for kind in kinds:
            for name, each in inspect.signature(kind).parameters.items():
                parameters.setdefault(name, each)
        told = signature.replace(parameters=list(parameters.values()))
        at = [name for name, each in parameters.items() if each.kind != each.KEYWORD_ONLY]

        @wraps(call)
        def checked(*given: Any, **named: Any) -> Any:
            plain = {name: value for name, value in named.items() if name not in tables}
            _check_known("argument", plain, [name for name in parameters if name != "self"])
            told.bind(*given, **plain)  # what is missing is named by the call, not by a class in it
            here = [_here(at[min(n, len(at) - 1)], each, sends) for n, each in enumerate(given)]
            return call(*here, **_here("", named, sends))

        checked.__signature__ = told  # type: ignore[attr-defined]
        checked.__doc__ = "\n".join([inspect.getdoc(call) or "", *_help_lines(kinds)])
        return typing.cast(Call, checked)

    return made


def _here(name: str, value: Any, sends: bool) -> Any:
    """What an argument of this name is given where it names a place on an object store."""
    if name == "out" and sends:
        return value
    if name in _STAY_HERE:
        for each in value if isinstance(value, list | tuple) else [value]:
            refuse_store(each)
    if isinstance(value, dict):
        return {inner: _here(inner, each, sends) for inner, each in value.items()}
    return copied(value) if name in _COPIED else value


def _help_lines(kinds: tuple[type, ...]) -> Iterator[str]:
    """What each setting means, under the name of its class."""
    for kind in filter(settings_of, kinds):
        yield f"\n{kind.__name__}:"
        for field in settings_of(kind):
            told = about(field)
            default = f" Default: {told.default_words}." if told.default_words else ""
            yield with_arguments(f"    {field.name}: {told.help}{default}")


def kinds_in(hint: Any) -> Iterator[Any]:
    """The types that a hint admits; a Literal of words is str."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for each in typing.get_args(hint):
            yield from kinds_in(each)
    else:
        yield str if typing.get_origin(hint) is typing.Literal else hint


def choices_of(field: dataclasses.Field, hint: Any) -> tuple[str, ...]:
    """The words that a setting may be, from its Literal where it has one."""
    hints = typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else (hint,)
    for each in hints:
        if typing.get_origin(each) is typing.Literal:
            return tuple(typing.get_args(each))
    return about(field).choices


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value in the setting's own type, or a refusal; a whole number passes for a float."""
    accepted = tuple(kinds_in(hint))
    if any(typing.get_origin(one) is tuple for one in accepted) and isinstance(value, list | tuple):
        (inner,) = {typing.get_args(kind)[0] for kind in accepted if typing.get_origin(kind)}
        return tuple(_typed(name, one, inner) for one in value)
    if float in accepted and type(value) is int:
        _check_number(name, value)
        return float(value)
    if str in accepted and isinstance(value, Path):
        return str(value)
    if type(value) in accepted or (Path in accepted and isinstance(value, Path)):
        return value
    if Path in accepted and isinstance(value, str):
        return Path(value)
    words = " or ".join(_in_words(kind) for kind in accepted if kind is not type(None))
    raise UsageError(f"{name}={value!r} is {_in_words(type(value))}, and {words} belongs there.")


def _in_words(kind: Any) -> str:
    kind = typing.get_origin(kind) or kind
    return _IN_WORDS.get(kind, f"a {kind.__name__}")


def read_toml(path: Path) -> dict[str, Any]:
    """The tree in `path`, or a usage error that names the file and the place."""
    try:
        return tomllib.loads(checked(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}). Give the path of a TOML file."
        ) from error
    except (ValueError, RecursionError) as error:  # not only its own: of too many digits, too deep
        raise UsageError(
            f"{path} is not TOML: {error}. Write one name = value per line."
        ) from error


def toml_text(tree: Mapping[str, Any]) -> str:
    """`tree` as TOML; a value of None is left out, since TOML has no word for it.

    Holds:
        round_trip: reading the text gives the tree back, without its Nones.

    >>> print(toml_text({"seed": 0, "train": {"model": "lstm", "steps": None}}), end="")
    seed = 0
    <BLANKLINE>
    [train]
    model = "lstm"
    """
    import tomli_w  # not on every GPU image, where scanning needs none of it

    return tomli_w.dumps(_without_none(tree))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_without_none(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def separated(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """A reader of values with commas between.

    >>> separated(int)("1, 10,100")
    (1, 10, 100)
    """

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise UsageError(
                f"{text!r} is not a list of {kind.__name__}s. Write them with commas between: 1,10,100"
            ) from None

    return read


def lines_of(path: str) -> tuple[str, ...]:
    """The lines of a text file."""
    return tuple(Path(path).read_text(encoding="utf-8").splitlines())


def bytes_from(text: str) -> int:
    """Bytes meant by '4GB', '512 MB' or '2000000000'.

    >>> bytes_from("4GB")
    4000000000
    >>> bytes_from("1.5 GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise UsageError(f"memory={text!r} is not a size. Write it like 4GB or 512MB.")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper() or " ")
    size = float(number) * (1024 if binary else 1000) ** power
    if size > 2**63:
        raise UsageError(
            f"memory={size:.3g} bytes is more than any machine has. Write it like 4GB."
        )
    return int(size)
