import contextlib
import json
import os
import random
import signal
import stat
from pathlib import Path

import pytest

from tightlip.core.errors import GuaranteeError
from tightlip.privacy import ledger as module
from tightlip.privacy.accounting import (
    EpsilonMeter,
    Mechanism,
    Release,
    epsilon_spent,
)
from tightlip.privacy.ledger import Ledger, guarantee_terms, read_ledger

KEYS = {
    *("mechanism", "epsilon", "delta", "unit", "adjacency", "sampling", "accountant", "steps"),
    *("standing", "because", "covers", "outside", "noise_multiplier", "clip_norm"),
    *("sampling_rate", "num_units", "expected_batch", "epsilon_rdp", "epsilon_as_published"),
    *("releases", "insecure_seed", "finished", "corpus_fingerprint"),
}
WORDS = Release(name="vocabulary", noise_multiplier=5.0, delta=1e-6, note="a DP histogram")


def terms(sigma=2.0, releases=(), **changed):
    given = {
        "delta": 1e-5,
        "unit": "user",
        "clip_norm": 1.0,
        "num_units": 1000,
        "expected_batch": 50,
        "corpus_fingerprint": "abc",
        "insecure_seed": False,
        "standing": "proved",
        "because": "Everything that shaped the weights is clipped and noised.",
        "covers": ["weights", "snapshots"],
        "outside": ["audits"],
    } | changed
    mechanism = Mechanism(noise_multiplier=sigma, sampling_rate=0.05, releases=tuple(releases))
    return guarantee_terms(mechanism, **given)


def meter_for(promised, num_steps=20):
    return EpsilonMeter(Mechanism.of_record(promised), promised["delta"], num_steps)


def begun(folder, **changed):
    promised = terms(**changed)
    return Ledger.begin(Path(folder) / "ledger.json", promised, meter_for(promised))


def test_a_new_ledger_is_on_disk_with_every_key_and_nothing_spent(tmp_path):
    ledger = begun(tmp_path / "run")
    there = json.loads(ledger.path.read_text())
    assert set(there) == {*KEYS, "sha256"}
    assert (there["steps"], there["epsilon"], there["finished"]) == (0, 0.0, False)
    assert there["adjacency"] == "add or remove one user"
    assert read_ledger(ledger.path) == ledger.record()


def test_epsilon_in_the_file_is_never_below_the_truth_of_its_steps(tmp_path):
    ledger = begun(tmp_path, releases=[WORDS])
    mechanism = Mechanism.of_record(terms(releases=[WORDS]))
    for steps in range(1, 25):  # a few beyond the plan
        ledger.charge()
        there = read_ledger(ledger.path)
        assert there["steps"] == ledger.steps == steps
        if steps % 6 == 0:
            assert there["epsilon"] >= epsilon_spent(mechanism, steps, 1e-5)
        assert there["epsilon_rdp"] is there["epsilon_as_published"] is None


def test_the_finished_record_has_the_exact_figures(tmp_path):
    ledger = begun(tmp_path)
    for _ in range(7):
        ledger.charge()
    record = ledger.finish()
    mechanism = Mechanism.of_record(terms())
    assert record == read_ledger(ledger.path)
    assert record["finished"]
    assert record["epsilon"] == epsilon_spent(mechanism, 7, 1e-5)
    assert record["epsilon_rdp"] == epsilon_spent(mechanism, 7, 1e-5, "rdp")
    assert record["epsilon_as_published"] == epsilon_spent(mechanism, 7, 1e-5, "published")
    ledger.charge()
    assert not read_ledger(ledger.path)["finished"]


def test_a_run_that_goes_on_keeps_what_it_has_charged(tmp_path):
    ledger = begun(tmp_path)
    ledger.charge()
    ledger.charge()
    better_put = terms(because="In other words.")
    resumed = Ledger.open(ledger.path, better_put, meter_for(better_put))
    assert resumed.steps == 2
    resumed.charge()
    assert read_ledger(ledger.path)["steps"] == 3


def test_a_run_without_noise_promises_nothing_and_goes_on(tmp_path):
    ledger = begun(tmp_path, sigma=0.0)
    ledger.charge()
    same = terms(sigma=0.0)
    resumed = Ledger.open(ledger.path, same, meter_for(same))
    resumed.charge()
    there = read_ledger(ledger.path)
    assert (there["steps"], there["epsilon"], there["standing"]) == (2, None, "measured only")
    noisy = terms()
    with pytest.raises(GuaranteeError, match="was begun with noise_multiplier="):
        Ledger.open(ledger.path, noisy, meter_for(noisy))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"sigma": 3.0}, "noise_multiplier"),
        ({"sigma": 3.0, "expected_batch": 60}, "expected_batch"),
        ({"delta": 1e-6}, "delta"),
        ({"unit": "example"}, "unit"),
        ({"clip_norm": 2.0}, "clip_norm"),
        ({"standing": "as published"}, "standing"),
        ({"insecure_seed": True}, "insecure_seed"),
        ({"releases": [WORDS]}, "releases"),
        ({"corpus_fingerprint": "xyz"}, "corpus_fingerprint"),
    ],
)
def test_a_run_cannot_go_on_under_other_terms(tmp_path, changed, name):
    ledger, other = begun(tmp_path), terms(**changed)
    with pytest.raises(GuaranteeError, match=f"was begun with {name}="):
        Ledger.open(ledger.path, other, meter_for(other))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"steps": -1}', '{"steps": "5"}', "\x00\x00"]
)
def test_a_damaged_ledger_is_refused(tmp_path, text):
    ledger = begun(tmp_path)
    ledger.path.write_text(text)
    with pytest.raises(GuaranteeError, match="damaged"):
        Ledger.open(ledger.path, terms(), meter_for(terms()))


def test_no_flipped_bit_changes_what_a_ledger_says(tmp_path):
    """Refused; or white space, or the checksum's own name, without which ε is worked out again."""
    ledger = begun(tmp_path)
    ledger.charge()
    content, record = ledger.path.read_bytes(), read_ledger(ledger.path)
    for place in range(len(content)):
        for bit in (1, 8, 32):
            ledger.path.write_bytes(
                content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
            )
            with contextlib.suppress(GuaranteeError):
                there = read_ledger(ledger.path)
                assert {name: there.get(name) for name in record} == record, (place, bit)


@pytest.mark.parametrize("changed", [{"epsilon": 0.01}, {"steps": 40}, {"sampling_rate": 0.9}])
def test_without_a_checksum_epsilon_must_cover_the_steps(tmp_path, changed):
    """As version 0.1 wrote it."""
    ledger = begun(tmp_path)
    for _ in range(3):
        ledger.charge()
    record = ledger.finish()
    ledger.path.write_text(json.dumps(record))
    assert read_ledger(ledger.path) == record
    ledger.path.write_text(json.dumps(record | changed))
    with pytest.raises(GuaranteeError, match="damaged"):
        read_ledger(ledger.path)


def test_a_missing_ledger_is_refused(tmp_path):
    with pytest.raises(GuaranteeError, match="missing"):
        Ledger.open(tmp_path / "ledger.json", terms(), meter_for(terms()))


def test_without_noise_the_ledger_claims_nothing(tmp_path):
    ledger = begun(tmp_path, sigma=0.0)
    ledger.charge()
    for record in (read_ledger(ledger.path), ledger.finish()):
        assert record["epsilon"] is None
        assert record["standing"] == "measured only"
        assert "no finite ε" in record["because"]


def test_only_the_owner_can_read_a_ledger(tmp_path):
    before = os.umask(0)
    try:
        ledger = begun(tmp_path / "run")
        ledger.charge()
    finally:
        os.umask(before)
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700
    assert [path.name for path in ledger.path.parent.iterdir()] == ["ledger.json"]


def test_charging_flushes_nothing_and_settling_flushes_file_and_folder(tmp_path, monkeypatch):
    ledger, flushed = begun(tmp_path), []

    def noting(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noting)
    ledger.charge()
    assert flushed == []
    ledger.settle()
    assert flushed == [str(ledger.path), str(tmp_path)]


def test_the_old_ledger_stands_until_the_new_one_is_whole(tmp_path, monkeypatch):
    ledger = begun(tmp_path)
    ledger.charge()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        ledger.charge()
    assert read_ledger(ledger.path)["steps"] == 1
    assert ledger.steps == 2  # what could not be written was not applied; it may be over-counted


@pytest.fixture(scope="module")
def warm_meter():
    """A meter that has worked out its points, so that a child does nothing but charge."""
    meter = meter_for(terms(), num_steps=10_000)
    for steps in range(1000):
        meter.upper(steps)
    return meter


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_moment_the_file_is_whole_and_never_behind(tmp_path, warm_meter, seed):
    promised, meter = terms(), warm_meter
    ledger = Ledger.begin(tmp_path / "ledger.json", promised, meter)
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        charge_and_report_until_killed(ledger, to_parent)
    os.close(to_parent)
    with os.fdopen(from_child) as reports:
        # Killed once it has reported so many steps; where it is by then, the machine decides.
        applied = [reports.readline() for _ in range(random.Random(seed).randint(1, 100))]
        os.kill(child, signal.SIGKILL)
        applied += reports.readlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    there = read_ledger(ledger.path)
    assert there["steps"] - int(applied[-1]) in (0, 1)
    resumed = Ledger.open(ledger.path, promised, meter)
    resumed.charge()
    assert read_ledger(ledger.path)["steps"] == there["steps"] + 1


def charge_and_report_until_killed(ledger, to_parent):
    try:
        while True:
            ledger.charge()
            os.write(to_parent, f"{ledger.steps}\n".encode())
    finally:
        os._exit(1)


@pytest.mark.parametrize("name", ["accounting", "plans", "composition", "ledger", "sampling"])
def test_accounting_needs_no_torch(name):
    source = Path(module.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    assert "torch" not in source
