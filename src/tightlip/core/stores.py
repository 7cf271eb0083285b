"""Object stores (s3://, gs:// and what fsspec knows): the one place that speaks to them.

Corpora are read where they lie, models copied to a cache here first, and finished reports put there,
a manifest last. Whatever is under way stays on a local disk: a store has neither rename nor locks.
"""

import errno
import fnmatch
import hashlib
import json
import logging
import mimetypes
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar

from tightlip.core.checksums import LIST, SEAL, checked_whole, digest_of, sealed, unsealed
from tightlip.core.errors import DamagedError, StoreError, UsageError, in_words, is_final, short
from tightlip.core.files import claimed, folder_written_whole, make_private_folder, store_address
from tightlip.core.progress import task

Made = TypeVar("Made")
MANIFEST = "manifest.json"
PATIENCE_SECONDS = 10.0  # beyond the tries that the stores' own libraries make
AT_ONCE = 8  # requests on their way
_ADDRESS = ".address"  # beside a copy and its bucket, of which none begins so: what it is of
_SERVER = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
# What a model is made of; never a pickle.
_OF_A_MODEL = {".safetensors", ".json", ".gguf", ".txt", ".model", ".jinja", ".tiktoken"}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_STAYS_HERE = {"scan", "measures"}  # of a report's folder, beside what is not of a report
_OF_A_REPORT = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*\.(json|parquet|html|csv)", re.ASCII)
log = logging.getLogger("tightlip")


@dataclass(frozen=True, order=True)
class Place:
    """An address taken apart: `path` is the bucket and what is in it."""

    scheme: str
    path: str
    query: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}{self.query}"

    def __truediv__(self, name: str) -> "Place":
        return Place(self.scheme, f"{self.path}/{name}", self.query)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def parent(self) -> "Place":
        return Place(self.scheme, self.path.rpartition("/")[0], self.query)

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]


@dataclass(frozen=True, order=True)
class StoreFile(Place):
    """One file on a store, which readers take for a path; `version` changes when it does."""

    size: int = 0
    version: str = ""

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    def stat(self) -> Any:
        about = hashlib.sha256(f"{self} {self.size} {self.version}".encode()).hexdigest()
        same = dict.fromkeys(("st_dev", "st_mtime_ns", "st_ctime_ns"), about)
        return SimpleNamespace(st_size=self.size, st_ino=about, **same)

    def open(self, mode: str = "rb") -> BinaryIO:
        (info,) = _tried("read", self, lambda: _system(self).get_file_info([self.path]))
        # Listed, some stores tell the time to the millisecond; asked about one file, to the second.
        if (info.size, _file(self, info).version[:-9]) != (self.size, self.version[:-9]):
            raise StoreError(f"{self} changed meanwhile, or is gone. Give the same command again.")
        return _tried("read", self, lambda: _system(self).open_input_file(self.path))


def place_of(given: Any) -> Place | None:
    """What an address on a store names; None for anything else, such as a local path.

    >>> place_of("s3://mails/2024/*.parquet")
    Place(scheme='s3', path='mails/2024/*.parquet', query='')
    """
    if (address := store_address(given)) is None:
        return None
    scheme, _, rest = address.partition("://")
    path, query = re.fullmatch(r"(.*?)(\?\w+=.*)?", rest, re.DOTALL).groups("")  # type: ignore[union-attr]
    user = path.partition("/")[0].rpartition("@")[0]
    if user not in ("", "anonymous") or re.search(r"key|secret|token", query):
        raise UsageError(
            f"The {scheme}:// address has a password in it, and addresses are written into reports. Leave it out: credentials "
            "are read where the store's own tools read them, such as AWS_PROFILE."
        )
    if scheme in ("http", "https", "file") or path[:1] in ("", "/"):
        raise UsageError(
            f"{address} is not a place on an object store, such as s3://BUCKET/FOLDER. Give one, or the path of a local copy."
        )
    if ".." in path.split("/"):
        raise UsageError(f"{address} leads upwards. Give the address itself.")
    return Place(scheme, path.strip("/"), query)


def _system(place: Place) -> Any:
    names = (*_SERVER, "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    try:
        return _file_system(place.scheme, place.bucket, place.query, *map(os.environ.get, names))
    except OSError as error:  # Amazon is asked for the bucket's region
        raise in_words(place, error) from error


@lru_cache
def _file_system(scheme: str, bucket: str, query: str, *environment: str | None) -> Any:
    """pyarrow's own file system, or else fsspec's; `environment` is what either reads of it."""
    from pyarrow import ArrowException, fs

    # The option sends a small file in one request, so that none is left half uploaded.
    at_once = f"{query}{'&' if query else '?'}allow_delayed_open=true"
    for asked in (at_once, query) if scheme == "s3" else (query,):
        with suppress(ArrowException, ImportError):
            return fs.FileSystem.from_uri(f"{scheme}://{bucket}{asked}")[0]
    try:
        import fsspec

        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme)))
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{scheme}:// cannot be read here ({short(error)}). s3:// and gs:// can, and what fsspec has a package for: "
            "install that, or copy what you need to a local folder."
        ) from error


def _tried(doing: str, place: Place, call: Callable[[], Made]) -> Made:
    """What `call` gives, asked again while the store fails; then an error in words."""
    started, wait = time.monotonic(), 0.1
    while True:
        try:
            return call()
        except OSError as error:
            # One with a file's name, or of a full disk, is of this machine.
            is_here = error.filename or error.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_here or isinstance(error, FileNotFoundError):
                raise
            if is_final(error) or time.monotonic() - started + wait > PATIENCE_SECONDS:
                raise in_words(place, error, doing) from error
        time.sleep(wait)
        wait *= 2


def files_at(place: Place, doing: str = "read") -> list[StoreFile]:
    """The file there, all files below, or those that a pattern names, sorted; none where none are."""
    from pyarrow import fs

    system, fixed = _system(place), re.split(r"[*?[]", place.path)[0]
    base = place.path if fixed == place.path else fixed.rpartition("/")[0]
    if base == place.path:
        (info,) = _tried(doing, place, lambda: system.get_file_info([base]))
        if info.is_file:
            return [_file(place, info)]
    is_deep = base == place.path or "/" in place.path[len(base) + 1 :]
    selector = fs.FileSelector(base, recursive=is_deep, allow_not_found=True)
    infos = _tried(doing, place, lambda: system.get_file_info(selector))
    if not infos and system.get_file_info([place.bucket])[0].type == fs.FileType.NotFound:
        raise in_words(place, OSError("NO_SUCH_BUCKET"), doing)
    found = [_file(place, info) for info in infos if info.is_file]
    if base != place.path:
        found = [file for file in found if _matches(file.path, place.path)]
    return sorted(found)


def _matches(path: str, pattern: str) -> bool:
    """As in a shell: a * stays within one folder."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _file(place: Place, info: Any) -> StoreFile:
    handler = getattr(_system(place), "handler", None)  # of fsspec, which tells no time
    version = info.mtime_ns if handler is None else handler.fs.ukey(info.path)
    return StoreFile(place.scheme, info.path, place.query, size=info.size, version=str(version))


def _download(files: Sequence[StoreFile], into: Path, what: str) -> None:
    """Copy the files, several at a time; one that is not as long as listed is asked for again."""

    def fetch(file: StoreFile) -> None:
        path = make_private_folder((into / file.path).parent) / file.name
        with file.open() as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if path.stat().st_size != file.size:
            raise OSError(f"{path.stat().st_size:,} of {file.size:,} bytes came")
        bar.advance(file.size)

    if odd := [file for file in files if ".." in file.path.split("/")]:
        raise UsageError(f"{odd[0]} has a name that leads upwards. Rename it.")
    with task(what, sum(file.size for file in files)) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda file: _tried("read", file, lambda: fetch(file)), files))


# Models and reports that are read


def copied(given: Any) -> Any:
    """The local copy of a model or a report in the place of its address; anything else as it is."""
    if isinstance(given, list):
        return [copied(each) for each in given]
    if (place := place_of(given)) is None:
        return given
    try:
        is_report = _manifest(place) is not None
    except DamagedError:  # a model may have one of its own
        is_report = False
    return fetched_report(place) if is_report else _cached(place)


def cache_folder() -> Path:
    """Where copies of models are, and reports that are not sent yet."""
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TIGHTLIP_CACHE") or Path(above) / "tightlip")


def _key(*about: object) -> str:
    """Another name for each server too: buckets of two may be called the same."""
    about += (*map(os.environ.get, _SERVER),)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:24]


def shown(path: Path) -> str:
    """The address that a copy here stands for; any other path as it is."""
    for folder in (path, *path.parents):
        if (address := folder / _ADDRESS).is_file() and (place := place_of(address.read_text())):
            rest = path.relative_to(folder / place.path).as_posix()
            return str(place if rest == "." else place / rest)
    return str(path)


def _cached(place: Place) -> Path:
    """The model's copy in the cache, made now unless the store still lists what was copied.

    Holds:
        whole: a copy that was interrupted is none.
        no_pickles: nothing that could execute code is copied.
    """
    files = files_at(place)
    wanted = _of_a_model(place, files)
    folder = cache_folder() / "models" / _key(place, wanted)
    if not folder.exists():
        # The claim also takes away what a killed copy left.
        with claimed(folder), folder_written_whole(folder) as beside:
            _download(wanted, beside, "Copying the model")
            (beside / _ADDRESS).write_text(str(place), encoding="utf-8")
            checked_whole(beside)
            if files_at(place) != files:
                raise StoreError(f"{place} changed meanwhile. Give the same command again.")
        log.warning(
            "%s was copied to %s (%s bytes), and is read from there while the store lists the same files. Delete %s to be rid "
            "of all such copies.",
            *(place, folder, f"{sum(file.size for file in wanted):,}", folder.parent),
        )
    return folder / place.path


def _of_a_model(place: Place, files: list[StoreFile]) -> list[StoreFile]:
    """What of the files is copied; refused where that is no model."""
    names = {file.path[len(place.path) + 1 :] for file in files}
    if not files:
        raise UsageError(f"{place} does not exist. Give the address of a model's folder.")
    if "summary.json" in names:
        raise _no_manifest(place)
    if "config.toml" in names:
        raise UsageError(
            f"{place} is a run, and runs are read from a local disk: copy it there, or give {place / 'model'} with its corpus."
        )
    wanted = [file for file in files if file.suffix in _OF_A_MODEL or file.name == LIST]
    weights = {file.suffix for file in wanted} & {".safetensors", ".gguf"}
    if not wanted or (not weights and {file.suffix for file in files} & _PICKLES):
        raise UsageError(
            f"{place} holds no .safetensors and no .gguf file, and others are never copied: unpickling can execute any code. "
            "Save the model with save_pretrained, which writes safetensors."
        )
    return wanted


_kept: list[TemporaryDirectory] = []  # reports that are read while this process lasts


def _kept_for(place: Place) -> Path:
    _kept.append(TemporaryDirectory(prefix="tightlip-"))
    root = Path(_kept[-1].name)
    (root / _ADDRESS).write_text(str(place), encoding="utf-8")
    return root


def fetched_report(place: Place) -> Path:
    """A copy of a whole report on a store, until this process ends.

    Holds:
        refused: a report without a manifest, or that is not what its manifest says, is not read.
    """
    if (manifest := _manifest(place)) is None or not manifest["whole"]:
        raise _no_manifest(place)
    told = {f"{place.path}/{name}": about for name, about in manifest["files"].items()}
    there = {file.path: file for file in files_at(place)}
    for path, (size, _) in told.items():
        if path not in there or there[path].size != size:
            raise _not_as_sent(place, path, "missing" if path not in there else "of another size")
    root = _kept_for(place)
    _download([there[path] for path in told], root, "Fetching the report")
    for path, (_, digest) in told.items():
        if digest_of(root / path) != digest:
            raise _not_as_sent(place, path, "of another content")
    return root / place.path


def _manifest(place: Place) -> dict[str, Any] | None:
    """What a report's manifest tells: its `kind`, whether it is `whole`, and of `files` size and
    checksum by name. None where there is none."""

    def read() -> bytes:
        with _system(place).open_input_stream((place / MANIFEST).path) as stream:
            return bytes(stream.read(1 << 26))

    try:
        record, is_sealed = unsealed(json.loads(_tried("read", place / MANIFEST, read)))
        if not is_sealed or record["format"] != 1:
            raise ValueError("it has no checksum, or is of another version")
        files = {each["name"]: (each["size"], each[SEAL]) for each in record["files"]}
        # It says what is deleted before the next report, so no name may lead elsewhere.
        if odd := [each for each in files if each == MANIFEST or not _OF_A_REPORT.fullmatch(each)]:
            raise ValueError(f"no report has a file {odd[0]!r}")
        return {"kind": str(record["kind"]), "whole": record["whole"] is True, "files": files}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"{place / MANIFEST} is damaged, or not written by this version of tightlip ({short(error)}). Send the report "
            "again, to another place."
        ) from error


def _no_manifest(place: Place) -> UsageError:
    return UsageError(
        f"{place} has no {MANIFEST}, or none that calls it whole, which comes last: there is no report, it is being sent now, "
        "or sending it was cut off. Give the command that makes it again."
    )


def _not_as_sent(place: Place, path: str, how: str) -> DamagedError:
    return DamagedError(
        f"{place} is not the report that its {MANIFEST} tells of: {path[len(place.path) + 1 :]} is {how}. Give the command that "
        "makes it again."
    )


# Reports that are sent


def work_folder(out: Any, kind: str, how: object = None) -> Path | None:
    """The folder to work in for `out`: itself, or where that is an address one here, which the same
    command finds again after a kill. Refused where nothing can be sent to the address."""
    if (place := place_of(out)) is None:
        return None if out is None else Path(out)
    if re.search(r"[*?[]", place.path):
        raise UsageError(f"{place} is a pattern. Give --out one place, without *, ? and [.")
    _names_there(place, kind)
    return cache_folder() / "reports" / _key(kind, how, place) / place.path


@contextmanager
def worked_in(out: Any, kind: str, how: object = None) -> Iterator[Any]:
    """The folder to work in, for whoever calls `send` there, and `set_aside` at the end."""
    if (folder := work_folder(out, kind, how)) is None or place_of(out) is None:
        yield folder
        return
    try:
        with claimed(folder):
            yield make_private_folder(folder)
    except StoreError as error:
        if not any(each.is_file() for each in folder.rglob("*")):
            raise
        raise StoreError(f"{error} What is worked out is kept in {folder}.") from error
    finally:
        if not any(each.is_file() for each in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.removedirs(folder.parent)  # empty once the report is set aside


def _names_there(place: Place, kind: str) -> set[str]:
    """The files of an earlier report of this kind, whole or cut off; refused where others are."""
    names, before = {file.path[len(place.path) + 1 :] for file in files_at(place, "write")}, None
    with suppress(DamagedError):
        before = _manifest(place)
    known = {MANIFEST, *before["files"]} if before else set()
    held = f"other files ({min(others)!r})" if (others := names - known) else None
    if before and not held and before["kind"] != kind:
        held = f"a report of the kind {before['kind']!r}"
    if held:
        raise UsageError(
            f"{place} holds {held}, and one of the kind {kind!r} would replace it or be mixed with it. Give --out a new or "
            "empty place."
        )
    return names - {MANIFEST}


def send(folder: Path, out: Any, kind: str) -> None:
    """Put a finished report on the store that `out` names, if it names one: the manifest last.

    Holds:
        whole: until all files are there, no manifest says that they are.
        replaced: of an earlier report there nothing is left.
        stays: scans, logs and what is hidden are not sent.
    """
    if (place := place_of(out)) is None:
        return
    paths = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    names = [name for name in sorted(paths) if _OF_A_REPORT.fullmatch(name)]
    names = [name for name in names if name.partition("/")[0] not in _STAYS_HERE]
    earlier = _names_there(place, kind) - {*names}
    files = [{"name": n, "size": paths[n].stat().st_size, SEAL: digest_of(paths[n])} for n in names]

    def tell(files: list[dict[str, Any]], whole: bool) -> None:
        record = sealed({"format": 1, "kind": kind, "whole": whole, "files": files})
        _put(json.dumps(record, indent=2).encode(), place / MANIFEST)

    # Cut off after this, all are known for ours, and the same command is taken from anywhere.
    tell(files + [{"name": name, "size": 0, SEAL: ""} for name in earlier], whole=False)
    with task("Sending the report", len(names)) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda name: _put(paths[name].read_bytes(), place / name), names):
            bar.advance()
    for name in earlier:
        with suppress(FileNotFoundError):
            _tried("write", place, partial(_system(place).delete_file, f"{place.path}/{name}"))
    tell(files, whole=True)


def _put(content: bytes, place: Place) -> None:
    kind = mimetypes.guess_type(place.name)[0] or "application/octet-stream"

    def put() -> None:
        target = _system(place).open_output_stream(place.path, metadata={"Content-Type": kind})
        with target:
            target.write(content)
        (info,) = _system(place).get_file_info([place.path])
        if info.size != len(content):
            raise OSError(f"{info.size} of {len(content):,} bytes are there")

    _tried("write", place, put)


def set_aside(folder: Path, out: Any) -> Path:
    """Where what was sent can be read until this process ends: no copy of it stays here."""
    if (place := place_of(out)) is None:
        return folder
    target = _kept_for(place) / place.path
    make_private_folder(target.parent)
    shutil.move(folder, target)
    return target
