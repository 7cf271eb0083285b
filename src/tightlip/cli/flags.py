"""Flags made from settings: a command takes its own parameters and a flag for every setting."""

import glob
import inspect
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tightlip.core import settings
from tightlip.core.errors import GuaranteeError, TightlipError, UsageError, names_flags
from tightlip.core.files import refuse_store, store_address
from tightlip.core.progress import harmless
from tightlip.core.settings import Settings, about, kinds_in, setting, settings_of

_PATTERNS = ("CORPUS", "SYNTHETIC", "TEXTS")  # of which several files may be one
_ON_STORES = (*_PATTERNS, "MODEL", "DIR", "REPORT")  # DIR: the base of an adapter
NO_VALUE = " "  # where <bool> would stand behind a switch, as if it took a value


def argument(thing: str, help: str, words: Collection[str] = ()) -> Any:
    """An argument that is the path of something, or one of `words`.

    Holds:
        first: one that leads nowhere is spoken of before what is missing and before any work.
    """
    return typer.Argument(metavar=thing, help=help, callback=_check_of(words))


def option(thing: str, help: str, words: Collection[str] = ()) -> Any:
    """The same as an option."""
    return typer.Option(metavar=thing, help=help, callback=_check_of(words))


def _check_of(words: Collection[str] = ()) -> Callable[..., Any]:
    def check(context: Any, param: Any, given: Any) -> Any:
        for path in given if isinstance(given, list | tuple) else [given]:
            if store_address(path) is not None and param.metavar in _ON_STORES:
                continue  # whoever reads it asks the store
            refuse_store(path)
            is_there = path is None or path in words or Path(path).exists()
            if not is_there and not (param.metavar in _PATTERNS and glob.glob(str(path))):
                what = param.help.partition(" [dim]")[0]  # behind it stands the default
                raise UsageError(f"{path} does not exist. Give {param.metavar}: {what}")
        return given

    return check


def path_flag(thing: str, help: str, words: Collection[str] = ()) -> Any:
    """An option that is the path of something, or one of `words`, and need not be given."""
    return Annotated[str | None, option(thing, help, words)]


Model = Annotated[
    str,
    argument(
        "MODEL",
        "A model's folder, an adapter's or a checkpoint's, a GGUF file, or a run of tightlip train.",
    ),
]
Corpus = Annotated[
    str | None, argument("CORPUS", "The text it was trained on. A run knows its own.")
]
Config = Annotated[Path | None, option("FILE", "A TOML file with the same names; flags win.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the record as JSON, all of it.", metavar=NO_VALUE)
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Try a little of it and tell what it would take: time, memory, disk. Writes nothing.",
        metavar=NO_VALUE,
    ),
]
Keys = Annotated[list[Path] | None, option("KEY", "A key.json of canaries. May be given again.")]


@dataclass(frozen=True, kw_only=True)
class OnDevice(Settings):
    """Where the work is done."""

    device: str = setting("auto", "cpu, cuda, or auto: the GPU where there is one.")


@dataclass(frozen=True, kw_only=True)
class KeptScan(Settings):
    """Whether the scan stays."""

    keep_scan: bool = setting(
        True,
        "Keep what the model made of each token, for other measures.",
        default_words="keep-scan",
    )


class _HelpIsASwitch:
    """--help does not look as if it took a value."""

    def get_help_option(self, ctx: Any) -> Any:
        if (option := super().get_help_option(ctx)) is not None:  # type: ignore[misc]
            option.metavar = NO_VALUE
        return option


class Group(_HelpIsASwitch, TyperGroup):
    """A command with commands in it; as in version 0.1, `canaries` and `represent` take options
    before the action."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.parent is not None and args and args[0].startswith("-"):
            actions = [place for place, word in enumerate(args) if word in self.commands]
            args = [args.pop(place) for place in actions[:1]] + args
        return super().parse_args(ctx, args)


class Command(_HelpIsASwitch, TyperCommand):
    """A command that refuses in a line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with refusals_in_a_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with refusals_in_a_line():
            return super().invoke(ctx)


def command_of(function: Callable[..., None], help: str | None) -> Any:
    """The command that a function with Typer's annotations is."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(cls=Command, help=help, epilog=getattr(function, "epilog", None))(function)
    command = typer.main.get_command(app)
    for param in command.params:
        if param.param_type_name == "argument":  # no <list[Path]> behind RUN
            param.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
    return command


@contextmanager
def refusals_in_a_line() -> Iterator[None]:
    """A refusal is one line and exit code 2, a broken guarantee 3, an interruption 130."""
    token = names_flags.set(True)
    try:
        yield
    except KeyboardInterrupt:
        _say("stopped. Give the same command again to go on.")
        raise typer.Exit(130) from None
    except GuaranteeError as error:
        _say(str(error))
        raise typer.Exit(3) from None
    except RuntimeError as error:
        if "Symlink loop" not in str(error):  # which pathlib does not call an OSError
            raise
        _say(f"{error}. Give another path, or remove the link.")
        raise typer.Exit(2) from None
    except (TightlipError, OSError) as error:
        # A full disk, a missing permission: the file and the reason, not our stack.
        _say(str(error))
        raise typer.Exit(2) from None
    finally:
        names_flags.reset(token)


def _say(line: str) -> None:
    # Of several processes on a machine all refuse, and one says why; one that fails alone has said it.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"tightlip: {harmless(line)}", file=sys.stderr)


def is_first_process() -> bool:
    """Whether this is the one that speaks, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def switch(name: str, text: str) -> Any:
    """A flag that is given or not."""
    option = typer.Option(name, help=text, metavar=NO_VALUE, show_default=False)
    return Annotated[bool | None, option]


def with_settings(
    *kinds: type[Settings], listed: Collection[str] | None = None, **others: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting of `kinds`; of two of one name the first counts.

    `others` are flags that the command only passes on, as Typer is told of them. The command's
    parameter `given` is a dictionary of all that were given; the help lists `others` where it
    stands. With `listed`, the other settings work all the same and are not in the help.
    """

    def made(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        flags = {name: _flag(name, kind) for name, kind in others.items()}
        for flag in (flag for kind in kinds for flag in _flags(kind, listed)):
            if flag.name not in own:
                flags.setdefault(flag.name, flag)

        def run(**arguments: Any) -> None:
            values = {name: arguments.pop(name, None) for name in flags}
            given = {name: value for name, value in values.items() if value not in (None, [])}
            command(**arguments, given=parsed(kinds, given))

        order = [each for name in own for each in (others if name == "given" else [name])]
        every = {**own, **flags}
        parameters = [
            every[name].replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name in dict.fromkeys([*order, *flags])
        ]
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return made


def _flag(name: str, kind: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _flags(kind: type[Settings], listed: Collection[str] | None) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(kind)
    for field in settings_of(kind):
        is_listed = not about(field).hidden if listed is None else field.name in listed
        read_as = _read_as(field, hints[field.name])
        option = _option(kind, field, hints[field.name], hidden=not is_listed)
        if field.default is MISSING:
            yield _flag(field.name, Annotated[read_as, option], inspect.Parameter.empty)
        else:
            yield _flag(field.name, Annotated[read_as | None, option])


def _read_as(field: Field, hint: Any) -> Any:
    """What Typer reads: text where the setting has its own reader, else the setting's type."""
    kinds = [kind for kind in kinds_in(hint) if kind is not type(None)]
    if about(field).parse is not None:
        return str
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return list[str]
    return next(kind for kind in (float, int, bool, str) if kind in kinds)


def _option(kind: type[Settings], field: Field, hint: Any, *, hidden: bool) -> Any:
    told, dashed = about(field), field.name.replace("_", "-")
    is_switch = bool in kinds_in(hint)
    names = f"--{dashed}/--no-{dashed}" if is_switch else f"--{dashed}"
    words = told.default_words or _in_words(field.default)
    return typer.Option(
        told.flag or names,
        help=told.help + (f" [dim]\\[default: {words}][/]" if words else ""),
        metavar=NO_VALUE if is_switch else _metavar(field, hint),
        show_default=False,
        rich_help_panel=settings.panel_of(kind, field),
        hidden=hidden,
        callback=_check_of() if told.path else None,
    )


def _metavar(field: Field, hint: Any) -> str | None:
    """What stands for the value in the help; None leaves it to Typer."""
    if known := about(field).path or "|".join(settings.choices_of(field, hint)):
        return known
    kinds = [typing.get_origin(kind) for kind in kinds_in(hint)]
    return "TEXT" if tuple in kinds or about(field).parse is not None else None


def _in_words(default: Any) -> str | None:
    """The default as one would write it; None where that says nothing."""
    if default is None or default is MISSING or isinstance(default, bool) or default == ():
        return None
    if isinstance(default, tuple):
        return ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in default)
    return f"{default:g}" if isinstance(default, float) else f"{default}"


def parsed(kinds: Collection[type[Settings]], given: dict[str, Any]) -> dict[str, Any]:
    """The given flags in their settings' own types."""
    readers = {
        field.name: about(field).parse
        for kind in kinds
        for field in settings_of(kind)
        if about(field).parse is not None
    }
    return {
        name: reader(value) if (reader := readers.get(name)) and isinstance(value, str) else value
        for name, value in given.items()
    }
