"""ε per person: runs are registered before their first step and compose, whatever becomes of them."""

import math
import os
import shutil
import stat

import pytest
from dp_accounting.pld import PLDAccountant

from privacy.accounts import theirs
from tightlip.cli.train import ledger as ledger_command
from tightlip.core import register
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import arithmetic_words, guarantee_words
from tightlip.core.run_folder import begin_run
from tightlip.privacy.accounting import EpsilonMeter, Mechanism, epsilon_spent
from tightlip.privacy.composition import enrolled, ledger
from tightlip.privacy.ledger import Ledger, guarantee_terms, read_ledger
from tightlip.privacy.people import (
    composable,
    num_other_people,
    people_of,
    runs_before,
    withdraw,
)
from tightlip.training.starting import guarantee_lines

MECHANISM = Mechanism(noise_multiplier=1.5, sampling_rate=0.05)
PLANNED = 40


def terms(name, people=("ann",), mechanism=MECHANISM, planned=PLANNED, **changed):
    given = {
        "delta": 1e-5,
        "unit": "user",
        "corpus_fingerprint": f"corpus of {name}",
        "insecure_seed": False,
        "standing": "proved",
        "because": "By a theorem.",
        "covers": [],
        "outside": [],
        "planned_steps": planned,
        "run": name,
        "people": people_of(people),
    } | changed
    return guarantee_terms(mechanism, **given)


def meter_of(promised):
    mechanism, planned = Mechanism.of_record(promised), promised["planned_steps"]
    return EpsilonMeter(mechanism, promised["delta"], planned)


def begun(folder, name, **changed):
    """A private run just before its first step, as the engine begins it."""
    promised = terms(name, **changed)
    begin_run(folder / name, {"corpus": {"folder": "corpus"}})
    run = Ledger.begin(folder / name / "ledger.json", promised, meter_of(promised))
    enrolled(run)
    return run


def by_hand(*runs, delta=1e-5):
    """Oracle: dp-accounting's own word on (σ, q, steps) of each run."""
    accountant = PLDAccountant()
    for sigma, rate, steps in runs:
        accountant = theirs(accountant, sigma, rate, steps)
    return accountant.get_epsilon(delta)


def test_a_run_is_on_record_before_its_first_step_with_all_that_it_plans_to_spend(
    tmp_path, register
):
    run = begun(tmp_path, "one")
    (entry,) = [line for line in register.read_text().splitlines() if '"run"' in line]
    assert '"planned_steps": 40' in entry
    assert str(run.path) in entry
    assert stat.S_IMODE(register.stat().st_mode) == 0o600
    there = read_ledger(run.path)
    assert there["steps"] == 0
    assert there["people"]["epsilon"] == pytest.approx(by_hand((1.5, 0.05, 40)), rel=1e-3)


def test_epsilon_is_that_of_the_plan_from_the_first_step_to_an_early_end(tmp_path):
    run = begun(tmp_path, "one")
    planned = epsilon_spent(MECHANISM, PLANNED, 1e-5)
    for steps in range(1, 6):
        run.charge()
        there = read_ledger(run.path)
        assert there["epsilon"] == planned
        assert epsilon_spent(MECHANISM, steps, 1e-5) <= there["epsilon_so_far"] < planned
    ended = run.finish()
    assert (ended["epsilon"], ended["steps"]) == (planned, 5)
    assert ended["epsilon_so_far"] == epsilon_spent(MECHANISM, 5, 1e-5)


def test_more_steps_than_were_planned_are_refused(tmp_path):
    run = begun(tmp_path, "one", planned=3)
    for _ in range(3):
        run.charge()
    with pytest.raises(GuaranteeError, match="All 3 planned steps are taken"):
        run.charge()
    with pytest.raises(GuaranteeError, match="begun with planned_steps=3"):
        Ledger.open(run.path, terms("one", planned=9), meter_of(terms("one", planned=9)))


def test_runs_of_the_same_people_compose_at_their_planned_maximum_whatever_their_corpora(tmp_path):
    begun(tmp_path, "one")  # killed here: it never took a step, and counts all the same
    other = Mechanism(noise_multiplier=2.0, sampling_rate=0.02)
    second = begun(tmp_path, "two", mechanism=other, planned=300)
    people = read_ledger(second.path)["people"]
    assert people["runs"] == 2
    both = by_hand((1.5, 0.05, 40), (2.0, 0.02, 300))
    assert people["epsilon"] == pytest.approx(both, rel=1e-3)
    # The first run's own ledger was written before; asked now, it says the same.
    assert ledger(tmp_path / "one")["people"]["epsilon"] == pytest.approx(both, rel=1e-3)


def test_two_months_at_eight_are_nearly_ten_for_a_person_in_both(tmp_path):
    monthly = Mechanism(noise_multiplier=0.53459, sampling_rate=0.05)
    begun(tmp_path, "last month", mechanism=monthly, planned=14)
    record = read_ledger(begun(tmp_path, "this month", mechanism=monthly, planned=14).path)
    assert record["epsilon"] == pytest.approx(8.0, abs=0.001)
    assert record["people"]["epsilon"] == pytest.approx(9.75, abs=0.01)
    assert record["people"]["epsilon"] == pytest.approx(by_hand((0.53459, 0.05, 28)), rel=1e-3)


def test_a_run_whose_folder_is_gone_counts_at_what_it_registered(tmp_path):
    begun(tmp_path, "one")
    shutil.rmtree(tmp_path / "one")
    second = begun(tmp_path, "two")
    assert read_ledger(second.path)["people"]["epsilon"] == pytest.approx(
        by_hand((1.5, 0.05, 80)), rel=1e-3
    )


def test_steps_that_a_killed_run_repeated_count_on_top(tmp_path):
    first, second = begun(tmp_path, "one"), begun(tmp_path, "two")
    first.steps = 70  # of which 40 were planned
    first.rewrite()
    people = ledger(second.path.parent)["people"]
    assert people["epsilon"] == pytest.approx(by_hand((1.5, 0.05, 110)), rel=1e-3)
    own = read_ledger(first.path)["people"]  # written at every step, hence an upper bound
    assert own["epsilon"] >= by_hand((1.5, 0.05, 70))


def test_a_run_that_goes_on_is_registered_once_and_a_copy_of_it_is_refused(tmp_path):
    run = begun(tmp_path, "one")
    promised = terms("one", run="another id, drawn at the resumption")
    resumed = Ledger.open(run.path, promised, meter_of(promised))
    enrolled(resumed)
    assert resumed.record()["run"] == "one"
    assert resumed.record()["people"]["runs"] == 1
    assert len(register.entries("run")) == 1

    copy = shutil.copytree(tmp_path / "one", tmp_path / "copy") / "ledger.json"
    with pytest.raises(GuaranteeError, match="or delete it first"):
        enrolled(Ledger.open(copy, promised, meter_of(promised)))
    charged = resumed.path.read_bytes()
    resumed.charge()
    with pytest.raises(GuaranteeError, match="Go on with that one; it has 1 steps on record"):
        enrolled(Ledger.open(copy, promised, meter_of(promised)))
    resumed.path.write_bytes(charged)
    moved = (tmp_path / "one").rename(tmp_path / "elsewhere") / "ledger.json"
    enrolled(Ledger.open(copy, promised, meter_of(promised)))  # nobody can tell it from the first
    with pytest.raises(GuaranteeError, match="is a copy"):
        enrolled(Ledger.open(moved, promised, meter_of(promised)))


def test_what_other_runs_came_to_is_not_forgotten_in_another_register(tmp_path, monkeypatch):
    begun(tmp_path, "one")
    second = begun(tmp_path, "two")
    here = read_ledger(second.path)["people"]
    assert here["runs"] == 2
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "another" / "register.jsonl"))
    assert ledger(second.path)["people"] == here  # as on another machine
    with pytest.raises(GuaranteeError, match="was registered beside 1 other run on its people"):
        enrolled(Ledger.open(second.path, terms("two"), meter_of(terms("two"))))
    assert read_ledger(second.path)["people"] == here
    finished = second.finish()["people"]  # whose register was deleted meanwhile
    assert (finished["runs"], finished["epsilon"]) == (2, here["epsilon"])
    # Nothing is forgotten of who had no other runs, nor of those that stand in the ledger itself.
    moved = begun(tmp_path, "three", before=runs_before(second.record()))
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "a third" / "register.jsonl"))
    again = Ledger.open(moved.path, terms("three"), meter_of(terms("three")))
    enrolled(again)
    assert again.record()["people"]["runs"] == 2


def test_repeated_steps_count_also_when_the_folder_is_gone(tmp_path):
    run = begun(tmp_path, "one")
    for _ in range(2):  # killed twice, and begun anew each time
        run = Ledger.open(run.path, terms("one"), meter_of(terms("one")))
        run.repeats = True
        enrolled(run)
        for _ in range(30):
            run.charge()
    shutil.rmtree(tmp_path / "one")
    people = read_ledger(begun(tmp_path, "two").path)["people"]
    assert people["epsilon"] >= by_hand((1.5, 0.05, 60 + 40))
    assert people["epsilon"] <= by_hand((1.5, 0.05, 60 + 40 + PLANNED // 2))


def test_a_run_that_goes_on_forgets_neither_its_people_nor_what_it_started_from(tmp_path):
    start = composable(terms("start") | {"steps": 40, "epsilon": 1.0})
    run = begun(tmp_path, "one", people=("ann", "bob"), before=[start])
    promised = terms("one", people=("cat",))
    again = Ledger.open(run.path, promised, meter_of(promised)).record()
    assert again["people"] == {"id": "ann", "also": ["bob", "cat"]}
    assert [each["run"] for each in again["before"]] == ["start"]
    promised.pop("people")
    assert Ledger.open(run.path, promised, meter_of(promised)).record()["people"]["id"] == "ann"


def declared(people, apart):
    register.add(lambda _: {"kind": "corpus", "people": [people], "sources": [], "apart": apart})


def test_all_runs_compose_but_of_people_who_were_declared_others(tmp_path):
    begun(tmp_path, "one")
    begun(tmp_path, "of two peoples", people=("ben", "cid"))
    run = begun(tmp_path, "other", people=("dan",))
    assert read_ledger(run.path)["people"]["runs"] == 3  # as though everybody were in each
    declared("eve", ["ann", "ben"])
    run = begun(tmp_path, "declared", people=("eve",))
    # Not that of "ann"; that of ben and cid still, for of cid nothing was said.
    assert read_ledger(run.path)["people"]["runs"] == 3
    assert num_other_people(("eve",)) == 1
    # It holds both ways.
    assert num_other_people(("ann",)) == 1
    again = begun(tmp_path, "one again")
    assert read_ledger(again.path)["people"]["runs"] == 4


def test_a_run_that_lost_its_promise_leaves_no_joint_epsilon_also_when_it_is_gone(tmp_path):
    first = begun(tmp_path, "one")
    first.taken_back = "The trained model mixes rows."
    record = first.finish()
    second = begun(tmp_path, "two")
    people = second.finish()["people"]
    assert people["epsilon"] is None
    assert "has no ε of its own" in people["because"]
    withdraw(record, first.path)
    first.path.unlink()
    assert begun(tmp_path, "three").finish()["people"]["epsilon"] is None


def test_a_run_that_loses_its_promise_beside_others_says_so_of_its_people_too(tmp_path):
    begun(tmp_path, "one")
    run = begun(tmp_path, "two")
    run.charge()
    assert read_ledger(run.path)["people"]["epsilon"] is not None
    run.taken_back = "The trained model mixes rows."
    for record in (run.record(), run.finish(), ledger(run.path)):
        people = record["people"]
        assert (people["epsilon"], people["standing"]) == (None, "measured only")
        assert record["epsilon_so_far"] is None
    assert run.epsilon == run.promised == math.inf  # as trainers log it


def test_a_known_seed_of_an_earlier_run_shows_in_every_place(tmp_path, capsys):
    begun(tmp_path, "one", insecure_seed=True, standing="as published")
    record = begun(tmp_path, "two").finish()
    assert guarantee_words(record).insecure
    assert "known seed" in "\n".join(guarantee_lines(record))
    ledger_command([tmp_path / "two"])
    assert "Insecure" in capsys.readouterr().out


def test_examples_and_users_have_no_joint_epsilon_and_it_says_so(tmp_path):
    begun(tmp_path, "one")
    run = begun(tmp_path, "two", unit="example")
    record = read_ledger(run.path)
    assert record["people"]["epsilon"] is None
    assert "differ in unit" in record["people"]["because"]
    assert "--other-people" in record["people"]["because"]
    assert guarantee_words(record).value.startswith("no ε for the people of all 2 registered runs")


def test_documents_of_the_same_people_compose_though_their_corpora_differ(tmp_path):
    begun(tmp_path, "one", unit="example")
    run = begun(tmp_path, "two", unit="example")
    assert read_ledger(run.path)["people"]["epsilon"] == pytest.approx(
        by_hand((1.5, 0.05, 80)), rel=1e-3
    )


def test_what_a_start_model_cost_composes_without_its_run_or_register(tmp_path):
    earlier = terms("elsewhere", people=("eve",)) | {"steps": 7, "epsilon": 1.0}
    before = runs_before(earlier)
    run = begun(tmp_path, "one", before=before, people=("ann", "eve"))
    people = read_ledger(run.path)["people"]
    assert people["runs"] == 2
    assert people["epsilon"] == pytest.approx(by_hand((1.5, 0.05, 80)), rel=1e-3)
    # Whether to add steps was decided when the first model was there.
    assert people["standing"] == "as published"
    assert "all settled beforehand" in people["because"]


def test_a_start_that_is_registered_here_counts_once_and_chains_are_whole(tmp_path):
    first = begun(tmp_path, "one")
    second = begun(tmp_path, "two", before=runs_before(first.record()))
    assert read_ledger(second.path)["people"]["runs"] == 2
    (latest, earliest) = runs_before(second.record())
    assert (latest["run"], earliest["run"]) == ("two", "one")
    # A run of an earlier version has no id; it counts by itself.
    unnamed = [{name: v for name, v in composable(first.record()).items() if name != "run"}]
    third = begun(tmp_path, "three", people=("new",), before=unnamed)
    assert read_ledger(third.path)["people"]["runs"] == 4


def test_runs_that_are_named_are_added_with_what_they_started_from(tmp_path):
    earlier = terms("elsewhere") | {"steps": 7, "epsilon": 1.0}
    runs = [begun(tmp_path, name, before=runs_before(earlier)) for name in ("one", "two")]
    joint = ledger(*(run.path.parent for run in runs))
    assert joint["num_runs"] == 3
    assert joint["epsilon"] == pytest.approx(by_hand((1.5, 0.05, 120)), rel=1e-3)


def test_a_start_that_does_not_say_what_it_cost_is_refused():
    whole = terms("one") | {"steps": 7, "epsilon": 1.0}
    for name in ("delta", "unit", "sampling_rate"):
        lacking = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(GuaranteeError, match="does not say enough to be composed"):
            runs_before(lacking)
        with pytest.raises(GuaranteeError, match="does not say enough to be composed"):
            runs_before({"before": [lacking]})
    assert runs_before({"epsilon": None, "standing": "measured only"}) == []


def test_runs_that_were_registered_meanwhile_count_at_the_end(tmp_path):
    first = begun(tmp_path, "one")
    begun(tmp_path, "two")
    first.charge()
    assert read_ledger(first.path)["people"]["runs"] == 1  # not asked at every step
    assert first.record(exact=True)["people"]["runs"] == first.finish()["people"]["runs"] == 2


@pytest.mark.parametrize("harm", ["a flipped bit", "a line that is none", "a line without seal"])
def test_a_damaged_register_is_refused_before_anything_is_trained(tmp_path, harm):
    begun(tmp_path, "one")
    path = register.register_path()
    content = path.read_bytes()
    path.write_bytes(
        {
            "a flipped bit": content.replace(b"1.5", b"9.5", 1),
            "a line that is none": b"\x00\x00\n" + content,
            "a line without seal": content + b'{"kind": "run"}\n',
        }[harm]
    )
    with pytest.raises(GuaranteeError, match="is damaged: a line of it"):
        begun(tmp_path, "two")


def test_a_register_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "folder"))
    with pytest.raises(GuaranteeError, match="set TIGHTLIP_REGISTER"):
        begun(tmp_path, "one")


def test_a_register_that_is_another_one_in_each_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTLIP_REGISTER", "register.jsonl")
    with pytest.raises(
        UsageError, match=r"would be register\.jsonl, which is another file in each"
    ):
        begun(tmp_path, "one")


def test_a_line_that_a_kill_cut_off_is_gone_at_the_next_one(tmp_path, register):
    begun(tmp_path, "one")
    with register.open("ab") as file:
        file.write(b'{"kind": "run", "terms": {"ru')
    second = begun(tmp_path, "two")
    assert read_ledger(second.path)["people"]["runs"] == 2


def test_no_line_is_lost_where_many_processes_write_at_once():
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            for line in range(20):
                register.add(lambda _, n=number, m=line: {"kind": "test", "line": 20 * n + m})
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert sorted(each["line"] for each in register.entries("test")) == list(range(160))


def test_the_register_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("TIGHTLIP_REGISTER")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert register.register_path() == tmp_path / "state/tightlip/register.jsonl"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert register.register_path() == tmp_path / ".local/state/tightlip/register.jsonl"


@pytest.mark.parametrize(
    ("arithmetic", "words"),
    [
        ("float32: measured 1.2e-06 C over 16 draws, 10 x charged", "float32 measured"),
        ("exact: units never meet in floating point", "exact"),
        (None, "arithmetic not recorded"),
    ],
)
def test_nothing_is_called_proved_without_its_arithmetic(tmp_path, arithmetic, words):
    given = {} if arithmetic is None else {"arithmetic": arithmetic}
    record = begun(tmp_path, "one", **given).finish()
    told = guarantee_words(record)
    assert told.badge == f"proved; {words}"
    assert told.value.endswith(f"(proved; {words})")
    assert f"Proved ({words})" in told.sentence
    assert arithmetic_words(record) == words
    # Several runs are not called proved: nobody knows whether they were settled beforehand.
    second = begun(tmp_path, "two", arithmetic="exact: units never meet in floating point")
    told = guarantee_words(second.finish()).value
    assert told.startswith("ε = ")
    assert "over 2 registered runs (as published)" in told
    assert told.endswith("(proved; exact)")


def test_a_run_goes_on_with_other_measurements_and_not_with_other_arithmetic(tmp_path):
    run = begun(tmp_path, "one", arithmetic="float32: measured 1e-06 C")
    again = terms("one", arithmetic="float32: measured 2e-06 C")
    assert Ledger.open(run.path, again, meter_of(again)).record()["arithmetic"].endswith("2e-06 C")
    exact = terms("one", arithmetic="exact: units never meet in floating point")
    with pytest.raises(GuaranteeError, match="begun with arithmetic="):
        Ledger.open(run.path, exact, meter_of(exact))
