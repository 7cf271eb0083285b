"""Errors that say what was given, why it cannot work and what to do next."""

import re
from contextvars import ContextVar
from typing import Any

# The command line sets it: there a refusal names flags, in Python arguments.
names_flags: ContextVar[bool] = ContextVar("names_flags", default=False)
# Of the flags that refusals name, those without a value.
_SWITCHES = {"allow_unproved", "choose", "mixed", "other_people", "scrub", "snapshots"}
# "tightlip prepare CORPUS --out DIR", to the end of its clause.
_COMMAND = r"\btightlip [a-z].*?(?=[.,;:)](?:\s|$)|$)"
# Behind a flag: its value, not a word that goes on with the sentence.
_VALUE = r"(?!(a|and|for|instead|leaves|needs|or|out|the|with)\b)('[^']*'|[\w/][\w/.,-]*(?<![.,]))"
_FLAG = rf"(?<![\w/'\"`.-])--(?P<name>[a-z][a-z-]*[a-z])(?: (?P<value>{_VALUE}))?"
_COMMAND_OR_FLAG = re.compile(f"{_COMMAND}|{_FLAG}", re.MULTILINE)
_AS_IT_IS = re.compile(r"[A-Z]+(/\w+)?|[\d.,]+|'.*'")  # DIR, RUN/model, 0.2

# What object stores answer.
_NO_BUCKET = re.compile(r"NO_?SUCH_?BUCKET|bucket (does not exist|'.*' not found)", re.IGNORECASE)
_DENIED = re.compile(
    r"ACCESS_?DENIED|FORBIDDEN|INVALID_(ACCESS_KEY|CLIENT|TOKEN)|SIGNATURE|credential|status:? 40[13]",
    re.IGNORECASE,
)


def with_arguments(line: str) -> str:
    """The line with arguments in the place of flags; whole commands stay as they are.

    >>> with_arguments("Use --split none, or --scrub. Run: tightlip prepare CORPUS --out DIR")
    "Use split='none', or scrub=True. Run: tightlip prepare CORPUS --out DIR"
    """
    return _COMMAND_OR_FLAG.sub(_as_argument, line)


def _as_argument(match: re.Match[str]) -> str:
    if match["name"] is None:
        return match[0]
    name, value = match["name"].replace("-", "_"), match["value"]
    if value is None:
        return f"{name}=True" if name in _SWITCHES else name
    return f"{name}={value if _AS_IT_IS.fullmatch(value) else repr(value)}"


class TightlipError(Exception):
    """Anything tightlip refuses on purpose."""

    def __str__(self) -> str:
        line = super().__str__()
        return line if names_flags.get() else with_arguments(line)


class UsageError(TightlipError):
    """The input or the flags cannot work. The command line prints the line and exits 2."""


class FullDiskError(UsageError):
    """There is no room for a file."""


class LostWorkersError(UsageError):
    """A cluster cannot go on now. What is done stays, for the same command given again."""


class DamagedError(UsageError):
    """A file that tightlip wrote is not what it was."""


class GuaranteeError(TightlipError):
    """Going on would print a guarantee that is not true."""


class StoreError(TightlipError):
    """A store that does not answer, or refuses. What was worked out here is kept."""


def in_words(place: Any, error: BaseException, doing: str = "read") -> StoreError:
    """What a store's failure means to whoever named the place."""
    done = "written" if doing == "write" else "read"
    if _NO_BUCKET.search(str(error)):
        return StoreError(
            f"{place} cannot be {done}: there is no bucket {place.bucket!r}. Give another, or make it."
        )
    if _DENIED.search(str(error)):
        return StoreError(
            f"{place} may not be {done} ({short(error)}). Credentials are missing, wrong, or not enough: set AWS_PROFILE or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for gs:// GOOGLE_APPLICATION_CREDENTIALS."
        )
    return StoreError(
        f"{place} could not be {done}: the store failed again and again ({short(error)}). Nothing half done counts. Give the "
        "same command again when it answers. Is AWS_ENDPOINT_URL right?"
    )


def is_final(error: BaseException) -> bool:
    """Whether asking the store again would change nothing."""
    return bool(_NO_BUCKET.search(str(error)) or _DENIED.search(str(error)))


def short(error: BaseException) -> str:
    """What a library says, in one line of no great length."""
    words = " ".join(re.sub(r"\(Request ID: \w+\)", "", str(error)).split())
    return words if len(words) <= 200 else f"{words[:197]}..."
