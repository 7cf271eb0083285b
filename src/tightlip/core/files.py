"""Files that appear whole or not at all, readable by their owner only.

Reports and corpora hold private text, so every file is created with mode 0600
and every folder with 0700, whatever the umask says.
"""

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tokenize import TokenError
from typing import Any

from tightlip.core import checksums
from tightlip.core.checksums import LIST, SEAL, checked, is_listed_kind, listed
from tightlip.core.errors import DamagedError, FullDiskError, TightlipError, UsageError

OWNER_FILE = 0o600
OWNER_FOLDER = 0o700
_PARTIAL, _LOCK = ".tightlip.partial", ".tightlip.lock"
_STRAY = {".DS_Store", ".localized", "Thumbs.db", "desktop.ini"}


def store_address(given: Any) -> str | None:
    """The address that is given in the place of a path, also where pathlib took a slash of it.

    >>> store_address(Path("s3://mails/2024")), store_address("mails/2024")
    ('s3://mails/2024', None)
    """
    if not isinstance(given, str | Path):
        return None
    found = re.match(r"([a-z][a-z0-9+.:-]+):/{1,2}", str(given), re.IGNORECASE)
    return None if found is None else f"{found[1].lower()}://{str(given)[found.end() :]}"


def refuse_store(given: Any) -> None:
    """Refuse to keep what is under way, or what promises rest on, on an object store."""
    if (address := store_address(given)) is not None:
        raise UsageError(
            f"{address} is on an object store or elsewhere, where there are neither rename nor locks: what is killed is left "
            "half written, and two at once spoil each other's work. Runs, prepared corpora, keys, ledgers and registers stay "
            "on a local disk. Give a local path, and copy what is finished."
        )


def make_private_folder(folder: Path) -> Path:
    """Create `folder` and what it lies in, for its owner only; what exists keeps its mode."""
    if not folder.exists():
        refuse_store(folder)
        make_private_folder(folder.parent)
        try:
            folder.mkdir(mode=OWNER_FOLDER, exist_ok=True)
        except FileExistsError as error:
            raise UsageError(
                f"{folder} is a link that leads nowhere, so nothing can be written there. Remove it, or give another --out."
            ) from error
    return folder


def names_in(folder: Path) -> set[str]:
    """What stands in `folder`, if it exists, but for what file managers leave everywhere, and what
    was never whole."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    ours = (_PARTIAL, _LOCK, LIST)
    return {n for n in names - _STRAY if not n.startswith("._") and not n.endswith(ours)}


@contextmanager
def written_whole(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes `path` in one step, on error it is gone.

    The folder's list of checksums names it, unless it stands `alone` in a folder of the user's.
    """
    make_private_folder(path.parent)
    beside = partial_beside(path)
    os.close(os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, OWNER_FILE))
    try:
        with full_disk_in_words(path, beside):
            yield beside
            fsync(beside)
            is_listed = is_listed_kind(path) and not (
                alone and path.name not in listed(path.parent)
            )
            with _alone_in(path.parent) if is_listed else nullcontext():
                if is_listed:
                    _list(path, also=checksums.digest_of(beside))
                os.replace(beside, path)
                fsync(path.parent)
                if is_listed:
                    _list(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let no other process change the folder's list meanwhile. The lock is a file of ours: people
    lock folders themselves, and network file systems lock no folder."""
    lock = folder / f"{LIST}{_LOCK}"
    descriptor = _locked(lock, waits=True)
    assert descriptor is not None
    try:
        yield
    finally:
        _unlock(lock, descriptor)


def _list(path: Path, *, also: str | None = None) -> None:
    """Make the list of a folder hold what its files are; of `path`, before its rename, `also` what it
    is about to be: killed before or after, the file is as the list has it."""
    if any(above.name.endswith(_PARTIAL) for above in path.parents):
        return  # what a folder under way holds is listed when it is whole
    folder, before = path.parent, listed(path.parent)
    files = dict(before)
    for name, digests in before.items():
        if len(digests) > 1 and (folder / name).is_file():
            # One that is neither is damaged, and stays so.
            files[name] = tuple({*digests} & {checksums.digest_of(folder / name)}) or digests
    if also is not None:
        files[path.name] = tuple(dict.fromkeys((*files.get(path.name, ()), also)))
    if files != before:
        _write_list(folder, files)


def _write_list(folder: Path, files: Mapping[str, tuple[str, ...]]) -> None:
    with written_whole(folder / LIST, alone=True) as beside:
        beside.write_text(checksums.list_text(files), encoding="utf-8")


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Like `written_whole` for a folder that does not exist yet, or is empty."""
    make_private_folder(folder.parent)
    beside = partial_beside(folder)
    shutil.rmtree(beside, ignore_errors=True)
    make_private_folder(beside)
    try:
        with full_disk_in_words(folder, beside):
            yield beside
            for path in beside.rglob("*"):
                path.chmod(OWNER_FOLDER if path.is_dir() else OWNER_FILE)
                if path.is_file():
                    fsync(path)
            for place in (beside, *beside.rglob("*/")):
                own = [each for each in place.iterdir() if each.is_file() and is_listed_kind(each)]
                _write_list(place, {path.name: (checksums.digest_of(path),) for path in own})
        if folder.exists() and not names_in(folder):
            (folder / LIST).unlink(missing_ok=True)
            for stray in folder.iterdir():
                stray.rename(beside / stray.name)
        os.rename(beside, folder)
        fsync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def full_disk_in_words(path: Path, beside: Path) -> Iterator[None]:
    """Say which file found no room, how large it was by then, and how much is left."""
    try:
        yield
    except Exception as error:  # each library has its own for this
        if "No space left" not in str(error) and getattr(error, "errno", None) != errno.ENOSPC:
            raise
        parts = beside.rglob("*") if beside.is_dir() else [beside]
        written = sum(part.stat().st_size for part in parts if part.is_file())
        free = shutil.disk_usage(path.parent).free
        raise FullDiskError(
            f"The disk is full: {path} needs more than {written:,} bytes, and {free:,} are free. Make room and give the "
            "same command again."
        ) from error


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Keep every other process from writing to `path`, a folder or a file, until the end.

    The lock is an empty file beside `path`, which may itself come to be by a rename; a killed
    process holds it no longer. Whoever holds it may claim it again.

    Holds:
        alone: of any number of processes one works, and the others are refused before they write.
        dead: a killed process keeps nothing.
        no_litter: nothing of it is left when it is given back.
    """
    place = Path(os.path.realpath(path))
    claim = (os.getpid(), place)  # a child that was forked holds nothing
    if claim in _claims:
        yield
        return
    make_private_folder(place.parent)
    lock = place.with_name(f".{place.name}{_LOCK}")
    if place.is_dir() and not os.access(place.parent, os.W_OK):
        lock = place / lock.name
    if (descriptor := _locked(lock)) is None:
        raise UsageError(
            f"{path} is in use by another tightlip process. Wait for it to end, or choose another --out."
        )
    _claims.add(claim)
    try:
        _remove_partials(place.parent.glob(f".*{_PARTIAL}"))
        remove_partials_in(place)
        yield
    finally:
        _claims.remove(claim)
        _unlock(lock, descriptor)


_claims: set[tuple[int, Path]] = set()


def _locked(lock: Path, *, waits: bool = False) -> int | None:
    """The lock, taken; None where another process has it and nobody `waits`."""
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, OWNER_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_still(lock, descriptor):
            return descriptor
        os.close(descriptor)  # its holder took the file away as we opened it


def _unlock(lock: Path, descriptor: int) -> None:
    if _is_still(lock, descriptor):
        lock.unlink()
    os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def partial_beside(path: Path) -> Path:
    """What becomes `path` once it is whole. The name says that it is ours, and whose of us."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_here()}{_PARTIAL}")


@cache
def _here() -> str:
    """Where the numbers of processes mean the same: this machine, and this container of it."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{socket.gethostname()} {numbers}".encode()).hexdigest()[:8]


def remove_partials_in(folder: Path, *, of_all: bool = False) -> None:
    """Take away what processes were killed while writing in a folder of ours, at every level; `of_all`
    what others write there too, which are known to have ended."""
    _remove_partials(folder.rglob(f".*{_PARTIAL}"), of_all=of_all)


def _remove_partials(paths: Iterable[Path], *, of_all: bool = False) -> None:
    """Nothing but what our own names say to be ours, of a process here that is no more: whoever
    writes inside a folder that we claim has not claimed all of it."""
    for path in [*paths]:
        named = re.fullmatch(r"\..+\.([0-9]{1,9})-([0-9a-f]{8})\.tightlip\.partial", path.name)
        if named is None:
            continue
        if not of_all and (named[2] != _here() or _is_running(int(named[1]))):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def fsync(path: Path) -> None:
    """Make what a file holds, or a rename in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, alone: bool = False) -> None:
    with written_whole(path, alone=alone) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, alone: bool = False) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", alone=alone)


def read_text(path: Path) -> str:
    """What a text file of ours holds."""
    if path.exists() and not path.is_file():  # a pipe would never end
        raise _damaged(path, "it is not a file")
    try:
        return checked(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, "it is not text") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # also of too many digits, too deep
        raise _damaged(path, "it is not JSON") from error


def write_sealed(path: Path, record: Mapping[str, Any]) -> None:
    """A record that is moved and copied by itself, with its checksum in it."""
    write_json(path, checksums.sealed(record), alone=True)


def read_sealed(path: Path) -> tuple[dict[str, Any], bool]:
    """A record, and whether its checksum was there and right; version 0.1 wrote none."""
    try:
        return checksums.unsealed(read_json(path))
    except ValueError as error:
        raise DamagedError(
            f"{path} is damaged, or was changed: {error}. Put a whole copy back, or make it again. If the change is yours "
            f"and meant, delete its {SEAL!r}."
        ) from error


@contextmanager
def damage_in_words(path: Path) -> Iterator[None]:
    """Say of a file, or a folder, without checksums that it is damaged, whatever that leads to."""
    try:
        yield
    except TightlipError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, EOFError, TokenError) as error:  # fmt: skip
        # The last is what numpy's reader of headers raises.
        raise _damaged(path, "its content makes no sense") from error
    except (ArithmeticError, MemoryError, OSError) as error:
        raise _damaged(path, f"it cannot be read ({type(error).__name__})") from error


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: {why}. Put a whole copy back, or make it again.")


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """The lines under one heading each; what a line does not have, or not know, is empty."""
    # A line with fewer figures must not push the others' columns to the end.
    fullest_first = sorted(lines, key=len, reverse=True)
    names = list(dict.fromkeys(name for line in fullest_first for name in line))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_no_formula, names))
    for line in lines:
        writer.writerow([_no_formula(line.get(name)) for name in names])
    return stream.getvalue()


def _no_formula(value: Any) -> Any:
    """Text that a spreadsheet would calculate, marked as text."""
    is_one = isinstance(value, str) and re.match(r"[\t\r]|\s*[=+@-]", value)
    return f"'{value}" if is_one else value


def digest_of_files(
    paths: Sequence[Any], *, name: Callable[[Any], str] = lambda path: path.name
) -> str:
    """SHA-256 over the files' names and contents, in the order given; several are read at a time."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for path, own in zip(paths, pool.map(checksums.digest_of, paths), strict=True):
            digest.update(name(path).encode() + b"\0" + bytes.fromhex(own))
    return digest.hexdigest()
