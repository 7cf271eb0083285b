import fcntl
import hashlib
import json
import os
import subprocess
import threading

import pytest

from tightlip.core.checksums import LIST, checked, listed, sealed, unsealed
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import (
    folder_written_whole,
    names_in,
    read_json,
    read_sealed,
    write_json,
    write_sealed,
    write_text,
)


@pytest.fixture
def folder(tmp_path):
    with folder_written_whole(tmp_path / "out") as beside:
        write_text(beside / "a.txt", "hello, you")
        (beside / "inner").mkdir()
        (beside / "inner/b.bin").write_bytes(bytes(range(256)))
        (beside / "README.md").write_text("a card")
    return tmp_path / "out"


def test_the_list_is_what_sha256sum_reads(folder):
    for place in (folder, folder / "inner"):
        done = subprocess.run(
            ["sha256sum", "-c", LIST], cwd=place, capture_output=True, check=False
        )
        lines = done.stdout.decode().splitlines()
        # Its last line is of the lines above it, which sha256sum cannot know.
        assert [line for line in lines if "OK" not in line] == [f"{LIST}: FAILED"]
        assert len(lines) == 2
    *above, last = (folder / LIST).read_text().splitlines(keepends=True)
    assert last == f"{hashlib.sha256(''.join(above).encode()).hexdigest()}  {LIST}\n"
    assert (folder / LIST).stat().st_mode & 0o777 == 0o600


def test_every_flipped_bit_and_every_cut_is_found(folder):
    path = folder / "a.txt"
    whole = path.read_bytes()
    bits = [
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        for at in range(len(whole))
        for bit in range(8)
    ]
    for changed in [*bits, *(whole[:end] for end in range(len(whole))), whole + b" "]:
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"a\.txt is damaged"):
            checked(path)
        with pytest.raises(DamagedError):
            checked(folder)
    path.write_bytes(whole)
    assert checked(folder) == folder
    assert checked(path) == path


def test_a_damaged_list_vouches_for_nothing(folder):
    path = folder / LIST
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError, match="delete the list"):
            checked(folder / "a.txt")
        path.write_bytes(whole[:at])
        with pytest.raises(DamagedError):
            checked(folder / "a.txt")
    path.unlink()
    (folder / "a.txt").write_text("mine")
    assert checked(folder / "a.txt").read_text() == "mine"


def test_what_is_not_listed_is_free(folder):
    (folder / "README.md").write_text("my own card")
    (folder / "more.txt").write_text("mine")
    assert checked(folder) == folder
    (folder / "a.txt").unlink()
    assert checked(folder, complete=False) == folder  # whoever needs it says that it is not there
    (folder / "a.txt").mkdir()
    with pytest.raises(DamagedError):
        checked(folder)


def test_a_large_file_is_read_once_and_again_when_it_changes(tmp_path):
    with folder_written_whole(tmp_path / "out") as beside:
        (beside / "large").write_bytes(bytes(2_000_000))
    path = checked(tmp_path / "out/large")
    with path.open("r+b") as stream:
        stream.seek(1_234_567)
        stream.write(b"x")
    with pytest.raises(DamagedError):
        checked(path)


@pytest.mark.parametrize("num_renames", [0, 1])
def test_killed_between_the_list_and_the_file_either_is_whole(tmp_path, monkeypatch, num_renames):
    for value in (1, 2):
        write_json(tmp_path / "a.json", value)
    plain, seen = os.replace, []

    def replace(source, target):
        if len(seen) == num_renames:
            raise KeyboardInterrupt
        seen.append(target)
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "a.json", 3)
    assert read_json(tmp_path / "a.json") == 2
    monkeypatch.undo()
    write_json(tmp_path / "a.json", 4)
    assert read_json(tmp_path / "a.json") == 4
    (tmp_path / "a.json").write_text("1\n")  # older than the one before
    with pytest.raises(DamagedError):
        read_json(tmp_path / "a.json")


def test_many_writers_of_one_folder_lose_no_line(tmp_path):
    def write(number):
        for turn in range(10):
            write_json(tmp_path / f"{number}.json", turn)
            assert read_json(tmp_path / f"{number}.json") == turn

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*listed(tmp_path)} == {f"{number}.json" for number in range(4)}


def test_a_sealed_record_finds_its_own_damage(tmp_path):
    record = {"epsilon": 5.06, "steps": 3, "who": "ä"}
    assert unsealed(json.loads(json.dumps(sealed(record)))) == (record, True)
    assert unsealed(record) == (record, False)
    path = tmp_path / "ledger.json"
    write_sealed(path, record)
    assert read_sealed(path) == (record, True)
    assert not (tmp_path / LIST).exists()
    path.write_text(path.read_text().replace("5.06", "1.06"))
    with pytest.raises(DamagedError, match="not what tightlip wrote"):
        read_sealed(path)
    for text in ("[]", "3", "{", "\xff", "9" * 5_000, '{"a":' * 100_000):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(DamagedError):
            read_sealed(path)


def test_a_listed_file_that_is_gone_is_missed_where_all_were_written_at_once(folder):
    (folder / "a.txt").unlink()
    assert checked(folder, complete=False) == folder
    with pytest.raises(DamagedError, match=r"a\.txt is missing"):
        checked(folder)


def test_a_file_put_back_with_its_old_time_is_whole_again(tmp_path):
    with folder_written_whole(tmp_path / "out") as beside:
        (beside / "large").write_bytes(bytes(2_000_000))
    path = tmp_path / "out/large"
    about, whole = path.stat(), path.read_bytes()
    for content in (b"x" + whole[1:], whole):
        path.write_bytes(content)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        if content == whole:
            assert checked(path) == path
        else:
            with pytest.raises(DamagedError):
                checked(path)


def test_a_folder_that_its_user_has_locked_can_be_written(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        write_json(tmp_path / "a.json", 1)
    finally:
        os.close(descriptor)
    assert read_json(tmp_path / "a.json") == 1
    assert names_in(tmp_path) == {"a.json"}


def test_names_that_no_list_can_hold_are_not_listed(tmp_path):
    with folder_written_whole(tmp_path / "out") as beside:
        for name in (b"a\rb", "a\u2028b".encode(), b"a\xffb", b"plain"):
            (beside / os.fsdecode(name)).write_bytes(b"x")
    assert {*listed(tmp_path / "out")} == {"plain"}


def test_a_listed_file_stays_listed_when_it_is_written_as_one_that_stands_alone(tmp_path):
    write_json(tmp_path / "a.json", 1)
    write_json(tmp_path / "a.json", 2, alone=True)
    assert read_json(tmp_path / "a.json") == 2


def test_a_list_that_may_not_be_read_is_not_called_damaged(folder, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(folder), "read_text", refused)
    with pytest.raises(UsageError, match=r"chmod g\+r"):
        checked(folder)


def test_a_list_of_thousands_is_parsed_once_and_anew_when_it_changes(tmp_path):
    with folder_written_whole(tmp_path / "out") as beside:
        for number in range(1_000):
            (beside / f"{number}.txt").touch()
    assert len(listed(tmp_path / "out")) == 1_000
    write_text(tmp_path / "out/more.txt", "")
    assert len(listed(tmp_path / "out")) == 1_001
