"""Adaptive private runs from the outside: weights, modes, what is refused, what is written."""

import json

import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from typer.testing import CliRunner

import tightlip
from killable import train_and_kill
from privacy.accounts import theirs
from tightlip.cli.main import app
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.run_folder import open_run
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.privacy_weights import PrivacyWeights, write_weights
from tightlip.privacy.adaptive import joint_multiplier
from tightlip.privacy.rdp_filter import epsilon_of_rdp
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import train_model as train
from tightlip.training.mitigations import LEDGER_KEYS
from training.small_corpora import documents, other_peoples_documents
from training.test_private_runs import interrupted_after

pytestmark = pytest.mark.slow

SMALL = {
    "embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "num_heads": 2,
    "sequence_length": 10, "mitigation": "adaptive-dp", "steps": 4,
}  # fmt: skip
MODES = {
    "clip": {"adaptive": "clip", "epsilon": 8.0},
    "scale": {"adaptive": "scale", "epsilon": 8.0, "noise_multiplier": 1.8},
    "as-published": {"adaptive": "as-published", "noise_multiplier": 1.0},
}
LEAST = 0.05


def adaptive(mode="clip", **changed):
    return TrainConfig.of(**{**SMALL, **MODES[mode], **changed})


def weigh(corpus, *, normalisation="public", rho=None, **told):
    """Weights beside the corpus, as `tightlip prepare --privacy-weights` leaves them."""
    count = len(corpus.train.bounds) - 1
    rho = np.random.default_rng(0).uniform(LEAST, 1, count) if rho is None else rho
    info = {
        "normalisation": normalisation, "is_sound": normalisation in ("public", "public-rank"),
        "estimator": "language model", "model": "some-model", "model_fingerprint": "abcdef",
        "public_corpus": "news.parquet", "public_corpus_fingerprint": "fedcba", "a": 1.25,
        "b": 7.75, "least_weight": LEAST, "version": "0.1.0",
        "text_fingerprint": corpus.train.corpus_fingerprint,
        "shared": {"public_corpus": None, "model_text": []},
    }  # fmt: skip
    made = PrivacyWeights(rho=rho, log_perplexities=rho * 3, info=info | told)
    write_weights(corpus.folder, made, None, "")
    return rho


@pytest.fixture(scope="module")
def public_tokenizer(tmp_path_factory):
    made = prepare(
        other_peoples_documents(), tmp_path_factory.mktemp("public") / "p", PrepareConfig()
    )
    return made.tokenizer_folder


@pytest.fixture
def corpus(tmp_path, public_tokenizer):
    config = PrepareConfig(tokenizer=str(public_tokenizer), split="none")
    rows = documents(num_documents=200, num_users=40)
    made = prepare(rows, tmp_path / "prepared", config)
    weigh(made)
    return made


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("unit", ["user", "example"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_for_both_units_and_says_what_it_is(
    mode, unit, optimizer, corpus, tmp_path
):
    run = train(corpus, tmp_path / "run", adaptive(mode, unit=unit, optimizer=optimizer))
    record = run.guarantee
    assert {*LEDGER_KEYS} <= {*record}
    assert record["adaptive"]["mode"] == mode
    assert record["adaptive"]["least_weight"] == LEAST
    assert record["adaptive"]["weights"]["public_corpus_fingerprint"] == "fedcba"
    assert record["standing"] == ("as published" if mode == "as-published" else "proved")
    assert record["epsilon"] <= 8.0 or mode == "as-published"
    assert any("news.parquet" in each for each in record["outside"])
    assert any("some-model" in each for each in record["outside"])
    assert record["steps"] == 4
    assert run.finished
    card = (run.model_folder / "README.md").read_text(encoding="utf-8")
    assert ("Differentially private" in card) == (mode != "as-published")
    assert ("No guarantee, a figure as published" in card) == (mode == "as-published")
    check_card(card, record)


def check_card(card, record):
    """The mode, how much noise there was at most and at least, and whose the weights are."""
    lines = [line[2:-2] for line in card.splitlines() if line.startswith("| ")]
    rows = dict(line.split(" | ", 1) for line in lines if " | " in line)
    own = record["adaptive"]
    assert rows["adaptive"] == own["mode"]
    assert rows["weights"] == "public, language model, some-model, news.parquet"
    if own["mode"] == "clip":
        assert float(rows["noise_multiplier"]) == own["noise_multiplier"]
        assert float(rows["least_clip"]) == own["least_clip"]
    else:
        assert "noise_multiplier" not in rows
        assert float(rows["full noise_multiplier"]) == own["noise_multiplier"]
        assert float(rows["least noise_multiplier"]) == record["noise_multiplier"]
        assert record["noise_multiplier"] < own["noise_multiplier"]


def test_with_whole_bounds_a_run_is_that_of_dp_bit_for_bit(corpus, tmp_path):
    plain = TrainConfig.of(**{**SMALL, "mitigation": "dp", "epsilon": 8.0, "insecure_seed": 1})
    own = adaptive("clip", least_clip=1.0, insecure_seed=1)
    one, other = train(corpus, tmp_path / "a", plain), train(corpus, tmp_path / "b", own)
    files = [(run.model_folder / "model.safetensors").read_bytes() for run in (one, other)]
    assert files[0] == files[1]
    for name in ("epsilon", "noise_multiplier", "delta", "steps"):
        assert one.guarantee[name] == other.guarantee[name]
    less = adaptive("clip", least_clip=0.3, insecure_seed=1)
    third = train(corpus, tmp_path / "c", less)
    assert (third.model_folder / "model.safetensors").read_bytes() != files[0]
    assert third.guarantee["epsilon"] == one.guarantee["epsilon"]


@pytest.mark.parametrize("normalisation", ["minmax", "rank"])
def test_weights_that_hang_on_others_are_for_as_published_only(normalisation, corpus, tmp_path):
    weigh(corpus, normalisation=normalisation)
    for mode in ("clip", "scale"):
        with pytest.raises(GuaranteeError, match="one document moves every other's weight"):
            train(corpus, tmp_path / "run", adaptive(mode, allow_unproved=True))
        assert not (tmp_path / "run").exists()
    run = train(corpus, tmp_path / "run", adaptive("as-published"))
    assert "every one of them depends on every document" in run.guarantee["because"]
    assert "one update shows it" in run.guarantee["because"]
    assert "our reading" in run.guarantee["because"]
    # The ends of the corpus' own range are somebody's text.
    assert {"a", "b"}.isdisjoint(run.guarantee["adaptive"]["weights"])


def test_a_corpus_without_weights_is_refused_with_the_way_to_make_them(public_tokenizer, tmp_path):
    rows = documents(num_documents=200, num_users=40)
    made = prepare(rows, tmp_path / "p", PrepareConfig(tokenizer=str(public_tokenizer)))
    with pytest.raises(UsageError, match=r"tightlip prepare CORPUS --out .* --privacy-weights"):
        train(made, tmp_path / "run", adaptive())
    with pytest.raises(UsageError, match="a raw corpus has none"):
        tightlip.train(
            rows, tmp_path / "raw", prepare={"tokenizer": str(public_tokenizer)},
            **adaptive().tree(),
        )  # fmt: skip
    with pytest.raises(UsageError, match="a raw corpus has none"):  # whatever else is wrong
        tightlip.train(rows, tmp_path / "raw", **adaptive().tree())
    assert {path.name for path in tmp_path.iterdir()} == {"p"}


def test_a_run_that_is_refused_leaves_no_folder_behind(corpus, tmp_path):
    dear = adaptive("scale", epsilon=0.05, noise_multiplier=0.3)
    with pytest.raises(UsageError, match="in its first step"):
        train(corpus, tmp_path / "run", dear)
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()  # somebody's own stays
    with pytest.raises(UsageError, match="in its first step"):
        train(corpus, tmp_path / "mine", dear)
    assert (tmp_path / "mine").is_dir()
    assert train(corpus, tmp_path / "mine", adaptive("clip")).finished


def test_what_the_weights_rest_on_is_said_once_and_not_how_much_is_shared(corpus, tmp_path):
    """How many documents stand in public text too depends on the private ones."""
    estimate = {"estimator": "frequency estimate", "model": "frequency estimate, no language model"}
    side = {"whole": 7, "documents": 200, "copied": 1, "long": 150}
    shared = {"public_corpus": {"here": side, "there": side}, "model_text": []}
    told = []
    for number, more in enumerate([{}, {"shared": shared}, estimate]):
        weigh(corpus, **more)
        told.append(train(corpus, tmp_path / str(number), adaptive()).guarantee["outside"])
    assert told[0] == told[1]
    assert sum("public text" in each for each in told[0]) == 1
    assert " ".join(told[2]).count("frequency estimate") == 1
    assert "language model" not in " ".join(told[2])


def test_the_terminal_says_that_the_budget_ended_a_run(corpus, tmp_path):
    weigh(corpus, rho=np.full(len(corpus.train.bounds) - 1, LEAST))
    flags = (
        "--mitigation adaptive-dp --adaptive scale --epsilon 8 --noise-multiplier 1.2 --steps 60"
    )
    small = "--embedding-size 8 --hidden-size 8 --num-layers 1 --batch-size 8"
    words = [str(corpus.folder), "--out", str(tmp_path / "run"), *flags.split(), *small.split()]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", *words])
    assert shown.exit_code == 0, shown.output
    run = open_run(tmp_path / "run")
    assert run.stop == "privacy budget"
    assert f"by its privacy budget, after step {run.metrics[-1]['step']}" in shown.stdout
    ended = f"The privacy budget ended training after step {run.metrics[-1]['step']} of 60."
    assert ended in (run.folder / "log.txt").read_text()
    training = [line for line in shown.stderr.splitlines() if line.startswith("Training")]
    assert training
    assert "100%" not in "".join(training).replace("100% spent", "")


def test_snapshots_as_published_tell_nothing_of_the_batches_before_them(corpus, tmp_path):
    """Their figure is that of the least noise; the one that was composed comes at the end."""
    found = []
    for number, rho in enumerate((0.1, 0.9)):
        weigh(corpus, rho=np.full(len(corpus.train.bounds) - 1, rho))
        config = adaptive("as-published", snapshot_steps=2)
        run = train(corpus, tmp_path / str(number), config)
        told = json.loads((run.folder / "snapshots/step-2/guarantee.json").read_text())
        found.append((told["epsilon"], run.guarantee["epsilon"]))
        ended = json.loads((run.model_folder / "guarantee.json").read_text())
        assert ended["epsilon"] == run.guarantee["epsilon"]
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1]


@pytest.mark.parametrize("mode", MODES)
def test_what_breaks_the_proof_of_dp_breaks_it_in_every_mode(mode, tmp_path):
    made = prepare(documents(num_documents=200, num_users=40), tmp_path / "p", PrepareConfig())
    weigh(made)
    with pytest.raises(GuaranteeError, match="vocabulary was learnt from this corpus"):
        train(made, tmp_path / "run", adaptive(mode))
    run = train(made, tmp_path / "run", adaptive(mode, allow_unproved=True))
    assert run.guarantee["standing"] == "as published"
    assert "vocabulary was learnt" in run.guarantee["because"]


@pytest.mark.parametrize(
    ("mode", "changed", "words"),
    [
        ("clip", {"gamma_floor": 0.3}, "gamma_floor=0.3 means nothing to adaptive='clip'"),
        ("scale", {"least_clip": 0.3}, "Add adaptive='clip'"),
        ("scale", {"adam_correction": 1.0}, "adam_correction=1.0 means nothing to .*'scale'"),
        ("as-published", {"adam_correction": 1.0}, "Add adaptive='clip'"),
        ("as-published", {"averaging": 0.5}, "averaging=0.5 means nothing"),
        ("as-published", {"epsilon": 3.0}, "epsilon=3 cannot be a target"),
        ("scale", {"noise_multiplier": 0.0}, "nothing to scale"),
        ("clip", {"epsilon": None}, "mitigation='adaptive-dp' needs a target"),
        ("clip", {"least_clip": 0.0}, "least_clip=0 is out of range"),
        ("clip", {"least_clip": 1.5}, "must be above 0 and at most 1"),
        ("scale", {"averaging": 1.0}, "averaging=1 is out of range"),
        ("scale", {"scale_accountant": "both"}, "Unknown scale_accountant 'both'"),
        ("clip", {"adaptive": "sideways"}, "Unknown adaptive 'sideways'"),
        ("clip", {"dp_check_canaries": 10}, "documents that have no privacy weight"),
        ("clip", {"dropout": 0.1}, "goes without dropout"),
        ("clip", {"mitigation": "dp", "least_clip": 0.3}, "Add mitigation='adaptive-dp'"),
        ("clip", {"mitigation": "none", "epsilon": None, "adaptive": "scale"}, "adaptive=scale"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(mode, changed, words):
    with pytest.raises(UsageError, match=words):
        adaptive(mode, **changed)


def test_settings_of_other_modes_are_not_kept_with_the_run():
    assert {"least_clip", "adaptive"} <= {*adaptive("clip").tree()["adaptive-dp"]}
    assert "gamma_floor" not in adaptive("clip").tree()["adaptive-dp"]
    assert "least_clip" not in adaptive("scale").tree()["adaptive-dp"]
    assert "adaptive" not in TrainConfig.of(mitigation="dp", epsilon=8.0).tree()["dp"]
    for mode in MODES:
        assert TrainConfig.of(**adaptive(mode).tree()) == adaptive(mode)


def test_with_a_target_alone_a_scale_run_takes_all_its_steps_though_the_scale_falls(
    corpus, tmp_path
):
    weigh(corpus, rho=np.full(len(corpus.train.bounds) - 1, LEAST))
    config = adaptive("scale", noise_multiplier=None, steps=20, averaging=0.3)
    run = train(corpus, tmp_path / "run", config)
    assert (run.stop, run.guarantee["steps"]) == ("steps", 20)
    assert 7.9 < run.guarantee["epsilon"] <= 8.0
    assert run.guarantee["standing"] == "proved"


def test_the_budget_ends_a_scale_run_and_the_run_says_so(corpus, tmp_path):
    rho = np.full(len(corpus.train.bounds) - 1, LEAST)
    weigh(corpus, rho=rho)
    config = adaptive("scale", noise_multiplier=1.5, steps=60, averaging=0.3)
    run = train(corpus, tmp_path / "run", config)
    record = run.guarantee
    assert run.stop == "privacy budget"
    assert 0 < record["steps"] < 60
    assert record["epsilon"] == 8.0
    lines = (run.folder / "noise_scales.jsonl").read_text().splitlines()
    by_hand = RdpAccountant([record["adaptive"]["order"]])
    for line in lines:
        sigma = json.loads(line)["noise_multiplier"]
        theirs(by_hand, joint_multiplier(sigma, record["adaptive"]["release_noise"]), 8 / 40, 1)
    assert len(lines) == record["steps"]
    assert by_hand.get_epsilon(record["delta"]) <= 8.0


@pytest.mark.parametrize("mode", MODES)
def test_nobodys_weight_is_in_what_may_be_shown(mode, corpus, tmp_path):
    rho = weigh(corpus)
    run = train(corpus, tmp_path / "run", adaptive(mode))
    shown = ["ledger.json", "metrics.jsonl", "model/README.md", "model/guarantee.json"]
    shown += ["noise_scales.jsonl"] if mode == "scale" else []
    for name in shown:
        told = (run.folder / name).read_text()
        assert not any(str(value)[:7] in told for value in rho)
        assert corpus.train.corpus_fingerprint not in told


def test_weights_made_anew_are_another_run(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(2, corpus, tmp_path / "run", adaptive())
    weigh(corpus, rho=np.full(len(corpus.train.bounds) - 1, 0.5))
    with pytest.raises(UsageError, match="weights_fingerprint"):
        train(corpus, tmp_path / "run", adaptive())


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_goes_on_keeps_what_it_charged_and_counts_what_it_repeats(
    mode, corpus, tmp_path
):
    config = adaptive(mode, epsilon=None, noise_multiplier=1.5, steps=6)
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(3, corpus, tmp_path / "run", config)
    before = open_run(tmp_path / "run").guarantee
    assert before["steps"] == 3
    run = train(corpus, tmp_path / "run", config)
    assert run.guarantee["steps"] == 6
    if mode == "scale":
        assert before["adaptive_state"]["num_releases"] == 3
        assert run.guarantee["adaptive_state"]["num_releases"] == 6


@pytest.mark.usefixtures("register_of_processes")
@pytest.mark.parametrize("mode", ["scale", "as-published"])
def test_killed_again_and_again_it_never_counts_less_than_it_spent(mode, command, corpus, tmp_path):
    # Noise of 4 is cheap, so that the budget outlives the kills.
    more = {"epsilon": 12.0} if mode == "scale" else {}
    config = adaptive(mode, noise_multiplier=4.0, steps=10, **more)
    applied = 0
    for applied in train_and_kill(command, corpus, tmp_path, config, num_kills=3):
        record = open_run(tmp_path / "run").guarantee
        assert record["steps"] >= applied
        if mode == "scale":
            check_charged(tmp_path / "run", record)
    run = train(open_prepared(corpus.folder), tmp_path / "run", config, RunOptions())
    assert run.finished
    assert run.guarantee["steps"] >= max(applied, 10)


def check_charged(folder, record):
    """What the ledger has spent is at least what every step on record cost by hand."""
    lines = (folder / "noise_scales.jsonl").read_text().splitlines()
    assert len(lines) >= record["steps"]
    by_hand = RdpAccountant([record["adaptive"]["order"]])
    # A line may stand there whose charge was never written, nor its step taken.
    for line in lines[: record["steps"]]:
        sigma = json.loads(line)["noise_multiplier"]
        theirs(by_hand, joint_multiplier(sigma, record["adaptive"]["release_noise"]), 8 / 40, 1)
    assert record["adaptive_state"]["rdp"] == pytest.approx(float(by_hand._rdp[0]), rel=0.05)


def test_the_ledger_command_tells_the_mode_and_where_the_weights_came_from(corpus, tmp_path):
    for mode in MODES:
        train(corpus, tmp_path / mode, adaptive(mode))

    def said(*folders):
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ledger", *map(str, folders)])
        assert shown.exit_code == 0
        return shown.stdout

    assert "least clip" in said(tmp_path / "clip")
    scale = said(tmp_path / "scale")
    assert "RDP filter at order" in scale
    assert "spent rdp" in scale
    assert "Another 1,000 steps" not in scale
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path / "scale"), "--json"])
    assert json.loads(shown.stdout).get("another_1000_steps") is None
    assert "news.parquet" in scale
    assert "as published" in said(tmp_path / "as-published")
    assert "(as published)" in said(tmp_path / "clip", tmp_path / "scale")
    assert "(as published)" in said(tmp_path / "clip", tmp_path / "as-published")
    figure = open_run(tmp_path / "as-published").guarantee["epsilon"]
    assert f" {figure:,.10g} (as published)" in said(tmp_path / "as-published")
    assert "accountant" in said(tmp_path / "scale", tmp_path / "scale")


def test_a_target_counts_what_a_noisy_vocabulary_told(tmp_path):
    made = prepare(
        documents(num_users=60), tmp_path / "p", PrepareConfig(vocabulary_noise=2.0, split="none")
    )
    weigh(made)
    run = train(made, tmp_path / "run", adaptive("scale", steps=3))
    (release,) = run.guarantee["releases"]
    own = run.guarantee["adaptive"]
    alone = RdpAccountant([own["order"]])
    theirs(alone, 1e9, 0.5, 1, release["noise_multiplier"])
    within = float(alone._rdp[0]) + own["rdp_budget"]
    left = run.guarantee["delta"] - release["delta"]
    assert epsilon_of_rdp(within, own["order"], left) == pytest.approx(8.0, rel=1e-6)
