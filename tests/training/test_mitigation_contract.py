"""What every registered mitigation owes: a newcomer is examined on arrival.

Private mitigations run with a known seed here, and on a public tokenizer, so that their bits can
be compared and nothing but the mitigation is in question.
"""

import random
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tightlip
from tightlip.core.registry import look_up, names_of
from tightlip.core.run_folder import open_run
from tightlip.core.settings import about, names_in, settings_of, toml_text
from tightlip.corpus.prepare import prepare_corpus
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.training.config import (
    MitigationConfig,
    RunOptions,
    TrainConfig,
    mitigation_config,
)
from tightlip.training.loop import Training, train_model
from tightlip.training.mitigations import LEDGER_KEYS
from training.small_corpora import WORDS, documents, other_peoples_documents

DOCS = Path(__file__).parents[2] / "docs"
SMALL = {"embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "steps": 6}
SMALL |= {"sequence_length": 10, "learning_rate": 0.01, "snapshot": "none"}
EACH = pytest.mark.parametrize("name", names_of("mitigation"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepares rows with a public tokenizer, and with privacy weights for whoever reads them."""
    folder = tmp_path_factory.mktemp("contract")
    public = prepare_corpus(other_peoples_documents(), folder / "public", PrepareConfig())
    config = PrepareConfig(tokenizer=str(public.tokenizer_folder), split="none")
    draw = random.Random(3)
    lines = [" ".join(draw.choices(WORDS, k=12)) for _ in range(150)]
    (folder / "public.csv").write_text("text\n" + "\n".join(lines) + "\n")

    def made(name, rows):
        corpus = prepare_corpus(rows, folder / name, config)
        tightlip.weigh(corpus, public_corpus=folder / "public.csv")
        return corpus

    return made


@pytest.fixture(scope="module")
def corpus(prepared):
    return prepared("own", documents(num_documents=120, num_users=24))


@pytest.fixture(scope="module")
def of_one_length(prepared):
    """Documents of eight words each: every row counts as much as every target."""
    rows = [
        {"user": f"user {n % 10}", "text": " ".join(WORDS[(n + place) % 12] for place in range(8))}
        for n in range(40)
    ]
    return prepared("equal", rows)


def settings_for(name, **changed):
    """Settings under which the mitigation works, from what its own fields say."""
    kind = mitigation_config(name)
    known = {"epsilon": 8.0, "insecure_seed": 1} if kind.is_private else {}
    return SMALL | {"mitigation": name} | known | changed


def weights_of(run):
    return load_file(run.model_folder / "model.safetensors")


def assert_same_bits(one, other):
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Each mitigation's run, trained when it is first asked for."""
    made = {}

    def run_of(name):
        if name not in made:
            out = tmp_path_factory.mktemp(name) / "run"
            made[name] = train_model(corpus, out, TrainConfig.of(**settings_for(name)))
        return made[name]

    return run_of


@EACH
def test_the_same_seed_gives_the_same_bits(name, corpus, runs, tmp_path):
    again = train_model(corpus, tmp_path / "run", TrainConfig.of(**settings_for(name)))
    assert_same_bits(runs(name), again)


@EACH
def test_another_seed_gives_other_weights(name, corpus, runs, tmp_path):
    other = train_model(corpus, tmp_path / "run", TrainConfig.of(**settings_for(name, seed=1)))
    mine, theirs = weights_of(runs(name)), weights_of(other)
    assert any(not torch.equal(mine[part], theirs[part]) for part in mine)


@EACH
def test_without_strength_training_is_left_as_it_is(name, corpus, of_one_length, tmp_path):
    """Bit for bit on the same batches. Private training draws its own: with every document in the
    batch, no noise and no bound, its step is the plain step on all of them."""
    kind = mitigation_config(name)
    text = of_one_length if kind.is_private else corpus
    shared = {"batch_size": 40, "steps": 1, "optimizer": "sgd"} if kind.is_private else {}
    own = {} if kind.strength_setting is None else {kind.strength_setting: 0.0}
    own |= {"batching": "uniform"} if "batching" in names_in(kind) else {}
    if kind.is_private:
        own |= {"epsilon": None, "clip_norm": 1e6, "unit": "example"}
        own |= {"least_clip": 1.0} if "least_clip" in names_in(kind) else {}
    config = TrainConfig.of(**settings_for(name, **shared, **own))
    mitigated = train_model(text, tmp_path / "run", config)
    plain = train_model(text, tmp_path / "plain", TrainConfig.of(**(SMALL | shared)))
    if not kind.is_private:
        assert_same_bits(plain, mitigated)
        return
    mine, theirs = weights_of(mitigated), weights_of(plain)
    assert mine.keys() == theirs.keys()
    for part in mine:
        torch.testing.assert_close(mine[part], theirs[part], rtol=0, atol=1e-6)


@EACH
def test_the_guarantee_is_honest(name, runs):
    record, kind = runs(name).guarantee, mitigation_config(name)
    assert {*LEDGER_KEYS} <= {*record}
    assert record["standing"] in ("proved", "as published", "measured only")
    assert record["because"]
    assert (record["mechanism"] == "none") == (name == "none")
    assert (record["epsilon"] is not None) == kind.is_private
    assert (record["standing"] == "measured only") == (record["epsilon"] is None)
    if kind.is_private:
        assert record["delta"] < 1
        assert record["steps"] == 6
        assert record["standing"] != "proved"  # a known seed protects nobody


@EACH
def test_an_interrupted_run_goes_on(name, corpus, runs, tmp_path):
    """Bit for bit; a private one draws fresh noise and counts every step that was taken."""
    config, plain = TrainConfig.of(**settings_for(name)), Training.take_step

    def cut(self):
        if self.progress.step == 3:
            self.save()
            raise KeyboardInterrupt
        plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "take_step", cut)
        with pytest.raises(KeyboardInterrupt):
            train_model(corpus, tmp_path / "run", config, RunOptions(checkpoint_seconds=1e6))
    assert not open_run(tmp_path / "run").finished
    resumed = train_model(corpus, tmp_path / "run", config)
    assert resumed.finished
    if config.mitigation.is_private:
        assert resumed.guarantee["steps"] == 6
        assert resumed.guarantee["epsilon"] >= runs(name).guarantee["epsilon"] * (1 - 1e-9)
    else:
        assert_same_bits(runs(name), resumed)


@EACH
def test_losses_on_private_text_are_published_only_without_a_promise(name, runs):
    run = runs(name)
    told = [line["train_perplexity"] for line in run.metrics]
    assert (told == [None] * len(told)) == mitigation_config(name).is_private


@EACH
def test_its_settings_say_what_they_are_and_come_back_from_toml(name):
    kind = mitigation_config(name)
    assert kind.name == name
    assert all(about(field).help for field in settings_of(kind))
    assert kind.strength_setting is None or kind.strength_setting in names_in(kind)
    assert kind.panel
    config = TrainConfig.of(**settings_for(name))
    assert TrainConfig.from_tree(tomllib.loads(toml_text(config.tree())), "") == config
    assert look_up("mitigation", name).config_kind is kind


@EACH
def test_its_settings_have_names_of_their_own(name):
    """Beside those of the run and of what is known of every mitigation, none of which they hide."""
    own = {*names_in(mitigation_config(name))}
    assert not own & {*names_in(TrainConfig, RunOptions, PrepareConfig)}
    assert not own & {"corpus", "out", "config", "mitigation", *dir(MitigationConfig)}


@EACH
def test_a_page_of_the_docs_shows_how_to_use_it(name):
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")]
    assert any(f"--mitigation {name}" in page for page in pages), name
