"""Comparing runs that were really trained: what is measured, kept, chosen and written."""

import json
import os
import random
import shutil
import stat
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import tightlip
from by_hand import unlisted
from tightlip.audit import measures
from tightlip.audit.comparison import Compared, _measuring, labels, promised, seconds_per_epoch
from tightlip.audit.subjects import of_run
from tightlip.core.errors import UsageError
from tightlip.core.files import names_in, read_sealed
from tightlip.core.registry import look_up, names_of
from tightlip.core.resampling import ResamplingSettings
from tightlip.core.run_folder import open_run
from tightlip.corpus.opening import open_run_corpus
from tightlip.models.folders import model_fingerprint
from tightlip.scan import models
from tightlip.scan.options import ScanOptions
from tightlip.scan.scanner import Scanner

pytestmark = pytest.mark.slow

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kite", "lark"]
RECIPE = {
    "embedding_size": 16,
    "hidden_size": 16,
    "num_layers": 1,
    "learning_rate": 0.02,
    "batch_size": 16,
    "epochs": 4.0,
}
DP = {
    "mitigation": "dp", "unit": "example", "epsilon": 8.0, "allow_unproved": True,
    "allow_loose_delta": True, "epochs": 2.0,
}  # fmt: skip
FEW = {"num_bootstraps": 100, "device": "cpu"}


def documents():
    """Twelve users, each with one document more than the one before."""
    draw = random.Random(0)
    return [
        (
            f"user {user}",
            " ".join(WORDS[(user + place) % 12] for place in range(draw.randint(3, 7))),
        )
        for user in range(12)
        for _ in range(4 + user)
    ]


def planted_after_the_split(folder):
    split = tightlip.prepare(documents(), folder / "split")
    tightlip.plant_canaries(
        split.folder / "train.parquet", folder / "planted",
        templates=["My code is {digits:2}"], repetitions=[1, 12],
    )  # fmt: skip
    return tightlip.prepare(
        folder / "planted/corpus.parquet", folder / "corpus",
        validation=str(split.folder / "validation"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    prepared = planted_after_the_split(folder)
    tightlip.train(prepared, folder / "plain", **RECIPE)
    tightlip.train(prepared, folder / "triplet", mitigation="triplet", **RECIPE)
    tightlip.train(prepared, folder / "dp", **RECIPE | DP)
    tightlip.train(
        folder / "planted/corpus.parquet", folder / "all", prepare={"split": "none", "deduplicate": "documents"},
        **RECIPE | {"epochs": 1.0},
    )  # fmt: skip
    return folder


def compared(place, *names, out, **settings):
    runs = [place / name for name in names]
    return tightlip.compare(runs, out=out, **{"key": place / "planted/key.json"} | FEW | settings)


@pytest.fixture(scope="module")
def made(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "comparison"
    return compared(place, "plain", "triplet", "dp", "all", out=out, notes=["A note."])


def test_the_files_are_there_for_their_owner_only(made):
    names = sorted(path.name for path in made.folder.iterdir())
    assert names == ["comparison.csv", "comparison.html", "comparison.json"]
    assert stat.S_IMODE(os.stat(made.folder).st_mode) == 0o700
    for path in made.folder.iterdir():
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert json.loads((made.folder / "comparison.json").read_text())["runs"] == made.rows
    assert "A note." in (made.folder / "comparison.html").read_text()


def test_every_figure_is_what_the_call_for_it_says(made, place):
    row = made.rows[1]
    report = tightlip.audit(place / "triplet")
    canaries = tightlip.measure_canaries(place / "triplet", place / "planted/key.json")
    texts = {one["text"] for one in canaries}
    groups = tightlip.measure_groups(
        place / "triplet", against=place / "plain", without_texts=texts, **FEW
    )
    membership = tightlip.measure_membership(place / "triplet", without_texts=texts, **FEW)
    for name in ("leaks", "people_affected", "unique"):
        assert row[name] == report.summary[name]
    assert row["perplexity"] == groups["perplexity"]
    assert row["perplexity"]["value"] == pytest.approx(report.validation_perplexity, rel=1e-4)
    assert row["gap"] == groups["gap"]
    assert row["membership"]["documents"] == membership["documents"]
    assert row["membership"]["not_counted"] == membership["not_counted"]
    assert [group["mean_bits"] for group in row["exposure"]] == [
        one["exposure_bits"] for one in sorted(canaries, key=lambda one: one["repetitions"])
    ]
    assert row["seconds_per_epoch"] > 0


def test_a_run_without_held_out_text_says_so(made):
    row = made.rows[3]
    assert row["perplexity"] is row["gap"] is row["membership"] is None
    assert row["unique"] is not None
    for measure in ("perplexity", "gap, low-5 to top-5", "membership AUC"):
        assert "no held-out text" in row["not_known"][measure]
    assert row["comparable"] is False  # and trained on other text
    assert "not known" in row["verdicts"][0]


def test_a_private_run_tells_no_time_and_shows_its_standing(made, place):
    row = made.rows[2]
    assert row["perplexity"]["value"] > 1
    assert row["seconds_per_epoch"] is None
    assert "private" in row["not_known"]["seconds per epoch"]
    assert row["guarantee"]["standing"] == "as published"
    assert row["guarantee"]["epsilon"] == tightlip.ledger(place / "dp")["epsilon"]
    assert made.rows[0]["guarantee"]["epsilon"] is None


def test_nothing_written_holds_text_or_names(made, place):
    key, _ = read_sealed(place / "planted/key.json")
    secrets = [canary["text"] for canary in key["canaries"]]
    for path in made.folder.iterdir():
        text = path.read_text()
        assert not [secret for secret in [*secrets, "user 1", "ant bee"] if secret in text], path


def refuse_to_measure(monkeypatch):
    def refused(*arguments, **settings):
        raise AssertionError("measured again")

    for name in names_of("audit"):
        monkeypatch.setattr(look_up("audit", name), "figures", refused)


def test_what_was_measured_is_not_measured_again(made, place, tmp_path, monkeypatch):
    refuse_to_measure(monkeypatch)
    again = compared(place, "plain", "triplet", "dp", "all", out=tmp_path / "again")
    assert again.rows == made.rows


@pytest.fixture
def counted(monkeypatch):
    """Folders of the models loaded, and tokens scanned."""
    counts = {"loads": [], "tokens": 0}
    plain_load, plain_scan = models.load_causal_lm, Scanner.begun

    def load(folder, **options):
        counts["loads"].append(folder)
        return plain_load(folder, **options)

    def scan(self, tokens, bounds, *scorer):
        counts["tokens"] += int(bounds[-1] - bounds[0])
        return plain_scan(self, tokens, bounds, *scorer)

    monkeypatch.setattr(models, "load_causal_lm", load)
    monkeypatch.setattr(Scanner, "begun", scan)
    return counts


def test_each_model_is_loaded_once_and_reads_each_text_once(place, tmp_path, counted):
    reference = trained_elsewhere(place, tmp_path)
    names = ("plain", "triplet", "dp")
    runs = [shutil.copytree(place / name, tmp_path / "runs" / name) for name in names]
    for run in runs:
        for kept in ("measures", "scan", "audit"):
            shutil.rmtree(run / kept, ignore_errors=True)
    counted |= {"loads": [], "tokens": 0}
    corpus = open_run_corpus(open_run(place / "plain"))
    per_model = corpus.train.num_tokens + corpus.validation.num_tokens
    settings = {"key": None, "reference": reference, **FEW}
    first = tightlip.compare(runs, out=tmp_path / "o", **settings)
    assert sorted(counted["loads"]) == sorted(
        [*(run / "model" for run in runs), reference / "model"]
    )
    assert counted["tokens"] == 4 * per_model
    counted |= {"loads": [], "tokens": 0}
    again = tightlip.compare(runs, out=tmp_path / "o", **settings)
    assert counted == {"loads": [], "tokens": 0}
    assert again.rows == first.rows
    # Measures that are made anew read what stands.
    tightlip.compare(runs, out=tmp_path / "o", **settings | {"seed": 3})
    assert counted == {"loads": [], "tokens": 0}
    stand = sorted((tmp_path / "runs").rglob("*.npz"))
    for folder in (tmp_path / "runs").rglob("measures"):
        shutil.rmtree(folder)
    tightlip.compare(runs, out=tmp_path / "o", keep_scan=False, **settings)
    assert sorted((tmp_path / "runs").rglob("*.npz")) == stand, "kept by those that were to keep"


def test_measures_are_made_anew_when_the_begin_token_changes(place, tmp_path):
    runs = [shutil.copytree(place / name, tmp_path / name) for name in ("plain", "triplet")]
    how = {"device": "cpu", "num_bootstraps": 100}
    before = tightlip.compare(runs, out=tmp_path / "o", **how).rows
    for run in runs:
        config = run / "model/tokenizer_config.json"
        tree = json.loads(config.read_text())
        del tree["bos_token"]
        unlisted(config).write_text(json.dumps(tree))
    after = tightlip.compare(runs, out=tmp_path / "o", **how).rows
    assert before[0]["perplexity"] != after[0]["perplexity"]


def test_a_reference_that_begins_otherwise_is_another_reference(place, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(place / "plain/model")
    tokenizer.backend_tokenizer.post_processor = None  # has a begin token and puts none
    tokenizer.save_pretrained(tmp_path)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    auto, always, never = (
        _measuring(None, tmp_path, ScanOptions(begin=begin), ResamplingSettings())
        for begin in ("auto", "always", "never")
    )
    assert auto == never != always


def test_only_the_measures_are_kept_and_no_report_with_text(made, place):
    folder = place / "plain/measures" / model_fingerprint(place / "plain/model")[:16]
    assert sorted(names_in(folder)) == [
        "exposures.json", "groups.json", "leakage.json", "membership.json",
    ]  # fmt: skip
    assert stat.S_IMODE(os.stat(folder / "exposures.json").st_mode) == 0o600


def test_another_key_is_measured_anew_and_a_damaged_file_too(made, place, tmp_path, monkeypatch):
    seen = []
    plain = measures.ModelMeasures._kept

    def watched(self, name, depends_on, measure):
        def noted():
            seen.append((self.audited.subject.run.folder.name, name))
            return measure()

        return plain(self, name, depends_on, noted)

    monkeypatch.setattr(measures.ModelMeasures, "_kept", watched)
    damaged = place / "triplet/measures" / model_fingerprint(place / "triplet/model")[:16]
    (damaged / "leakage.json").write_text("{")
    key, _ = read_sealed(place / "planted/key.json")
    key["canaries"] = key["canaries"][:1]
    (tmp_path / "key.json").write_text(json.dumps(key))
    found = compared(place, "plain", "triplet", key=tmp_path / "key.json", out=tmp_path / "o")
    assert sorted(seen) == [
        ("plain", "exposures"), ("plain", "groups"), ("plain", "membership"),
        ("triplet", "exposures"), ("triplet", "groups"), ("triplet", "leakage"),
        ("triplet", "membership"),
    ]  # fmt: skip
    assert [row["tab"]["planted"]["num_canaries"] for row in found.rows] == [1, 1]


def test_at_a_perplexity_the_first_snapshot_that_reaches_it_is_taken(place, tmp_path):
    known = [line["validation_perplexity"] for line in open_run(place / "plain").metrics]
    target = known[1] * 1.001
    found = compared(
        place, "plain", "triplet", out=tmp_path / "o", at_perplexity=target, tolerance=0.5
    )
    for row, name in zip(found.rows, ("plain", "triplet"), strict=True):
        record = open_run(place / name)
        reached = [m["snapshot"] for m in record.metrics if m["validation_perplexity"] <= target]
        assert row["model"] == (reached[0] if reached else None)
    assert found.rows[0]["model"] == "epoch-2"
    assert found.rows[0]["perplexity"]["value"] == pytest.approx(known[1], rel=1e-4)


def test_a_private_run_is_chosen_by_measuring_and_pays_with_its_standing(place, tmp_path):
    record = open_run(place / "dp")
    assert {line["validation_perplexity"] for line in record.metrics} == {None}
    first = tightlip.measure_groups(record.snapshots[0].folder, **FEW)
    target = first["perplexity"]["value"] * 1.001
    found = compared(place, "plain", "dp", out=tmp_path / "o", at_perplexity=target)
    assert found.rows[1]["model"] == "epoch-1"
    assert "chosen by its perplexity on held-out text" in found.rows[1]["guarantee"]["sentence"]
    assert found.rows[1]["guarantee"]["standing"] == "as published"


@pytest.mark.parametrize(("was_chosen", "standing"), [(False, "proved"), (True, "as published")])
def test_choosing_by_private_text_costs_a_proof(place, was_chosen, standing):
    record = open_run(place / "dp")
    proved = replace(record, guarantee=record.guarantee | {"standing": "proved"})
    one = Compared(
        subject=replace(of_run(record), run=proved),
        name="dp",
        model="epoch-1",
        measures=None,
        texts={},
        was_chosen=was_chosen,
    )
    assert promised(one)["standing"] == standing
    assert promised(one)["epsilon"] == record.guarantee["epsilon"]


def test_a_run_that_never_got_there_is_listed(place, tmp_path):
    known = [line["validation_perplexity"] for line in open_run(place / "plain").metrics]
    target = min(known) * 1.001
    found = compared(place, "plain", "dp", "all", out=tmp_path / "o", at_perplexity=target)
    assert [row["comparable"] for row in found.rows] == [True, False, False]
    assert "No snapshot reached" in found.rows[1]["verdicts"][0]
    assert "no held-out text" in found.rows[2]["verdicts"][0]
    assert found.rows[1]["unique"] is None


def test_canaries_of_unknown_words_leave_the_other_measures(place, tmp_path, caplog):
    key, _ = read_sealed(place / "planted/key.json")
    text = json.dumps(key).replace("My code", "Ny kode")
    (tmp_path / "key.json").write_text(text)
    found = compared(place, "plain", "triplet", key=tmp_path / "key.json", out=tmp_path / "o")
    assert "cannot be measured under this model" in found.rows[0]["not_known"]["exposure"]
    assert found.rows[0]["unique"] is not None
    assert "kode" in caplog.text  # the owner learns which
    assert "kode" not in (found.folder / "comparison.json").read_text()


def test_real_canaries_are_not_held_against_the_run_that_chose_them(place, tmp_path):
    tightlip.choose_canaries(
        place / "plain", tmp_path / "real.json", key=place / "planted/key.json"
    )
    keys = [place / "planted/key.json", tmp_path / "real.json"]
    found = compared(place, "plain", "triplet", key=keys, out=tmp_path / "o")
    assert [row["tab"]["real"] is None for row in found.rows] == [True, False]
    assert "would flatter it" in found.rows[0]["not_known"]["tab of real canaries"]
    assert [len(row["exposure"]) for row in found.rows] == [2, 2]


def test_a_reference_model_gives_leakage_epsilon_and_its_score(place, tmp_path):
    reference = trained_elsewhere(place, tmp_path)
    found = compared(place, "plain", "triplet", reference=reference / "model", out=tmp_path / "o")
    report = tightlip.audit(place / "plain", public_model=reference / "model")
    assert found.rows[0]["leakage_epsilon"] == pytest.approx(report.leakage_epsilon)
    assert found.rows[0]["membership"]["documents"]["scores"]["reference"] is not None


def trained_elsewhere(place, tmp_path):
    """A model that never saw the runs' text and reads it as they do."""
    others = [(f"other {user}", " ".join(reversed(text.split()))) for user, text in documents()]
    corpus = tightlip.prepare(
        others, tmp_path / "others", split="none", tokenizer=str(place / "plain/model")
    )
    tightlip.train(corpus, tmp_path / "reference", **RECIPE | {"epochs": 1.0})
    return tmp_path / "reference"


@pytest.mark.parametrize("inside", ["", "model"])
def test_a_reference_that_saw_the_text_is_refused_even_where_its_score_is_kept(
    place, tmp_path, inside, monkeypatch
):
    with monkeypatch.context() as patched:  # kept when nobody looked
        patched.setattr("tightlip.audit.subjects.check_reference", lambda *given: [])
        compared(place, "plain", "triplet", reference=place / "dp/model", out=tmp_path / "before")
    with pytest.raises(UsageError, match="so it is no reference"):
        compared(place, "plain", "triplet", reference=place / "dp" / inside, out=tmp_path / "o")


# Whose text is measured


@pytest.fixture
def elsewhere(tmp_path):
    """The runs and their corpus on a path of their own, to be tampered with."""
    prepared = planted_after_the_split(tmp_path)
    for name, seed in (("plain", 0), ("again", 1)):
        tightlip.train(prepared, tmp_path / name, seed=seed, **RECIPE | {"epochs": 1.0})
    return tmp_path


def put_other_text_in_place(elsewhere):
    (elsewhere / "corpus").rename(elsewhere / "true")
    tightlip.prepare(
        [(user, f"{text} and so on") for user, text in documents()], elsewhere / "corpus",
        tokenizer=str(elsewhere / "true/tokenizer"),
    )  # fmt: skip


def test_other_text_at_the_runs_path_is_refused_and_never_kept(elsewhere):
    put_other_text_in_place(elsewhere)
    with pytest.raises(UsageError, match="another training text and another held-out text"):
        compared(elsewhere, "plain", "again", out=elsewhere / "o")
    assert not list(elsewhere.glob("*/measures/*/*"))
    shutil.rmtree(elsewhere / "corpus")
    (elsewhere / "true").rename(elsewhere / "corpus")
    found = compared(elsewhere, "plain", "again", out=elsewhere / "o")
    report = tightlip.audit(elsewhere / "plain")
    assert found.rows[0]["unique"] == report.unique


def test_every_audit_of_a_run_refuses_other_text_at_its_path(elsewhere):
    put_other_text_in_place(elsewhere)
    plain = elsewhere / "plain"
    for audit in (
        lambda: tightlip.audit(plain),
        lambda: tightlip.measure_membership(plain, **FEW),
        lambda: tightlip.measure_groups(plain, **FEW),
        lambda: tightlip.choose_canaries(plain, elsewhere / "real.json"),
    ):
        with pytest.raises(UsageError, match="would say nothing about the run"):
            audit()
    # Whoever names the corpus means it.
    assert tightlip.audit(plain, elsewhere / "corpus").summary["num_users"] == 12


def test_seconds_are_the_median_over_whole_epochs(place):
    record = open_run(place / "plain")
    seconds = sorted(line["seconds"] for line in record.metrics)
    assert seconds_per_epoch(record) == (pytest.approx((seconds[1] + seconds[2]) / 2), None)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    assert labels([tmp_path / "a/run", tmp_path / "b/run"]) == ["a/run", "b/run"]
    assert labels([tmp_path / "a/run", tmp_path / "b/go"]) == ["run", "go"]


@pytest.mark.parametrize(
    ("names", "settings", "words"),
    [
        ((), {}, "No model was given"),
        (("plain",), {}, "One model was given"),
        (("plain", "plain"), {}, "same model was given twice"),
        (("plain", "corpus"), {}, "config.json"),
        (("plain", "dp"), {"tolerance": 0}, "tolerance=0"),
        (("plain", "dp"), {"num_bootstraps": 5}, "num_bootstraps=5"),
        (("plain", "dp"), {"tolerence": 0.1}, "Unknown argument 'tolerence'. Closest: tolerance"),
        (("plain", "dp"), {"device": "abacus"}, "Unknown device 'abacus'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_work(place, tmp_path, names, settings, words):
    with pytest.raises(UsageError, match=words):
        compared(place, *names, out=tmp_path / "o", **settings)
    assert not (tmp_path / "o").exists()


def test_somebodys_other_files_are_not_mixed_with(place, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        compared(place, "plain", "dp", out=tmp_path)
