"""What a start, a vocabulary and a second run cost the people in a corpus that changed a little."""

import json
import re
import shutil

import pytest
import torch
from dp_accounting.pld import PLDAccountant
from transformers import GPT2Config, GPT2LMHeadModel

import tightlip
from by_hand import unlisted
from privacy.accounts import theirs
from tightlip.core.errors import GuaranteeError
from tightlip.corpus.history import people_of
from tightlip.privacy import PrivateTraining
from tightlip.training.loop import Training
from tightlip.training.starting import model_card
from training.small_corpora import WORDS, documents, other_peoples_documents

pytestmark = pytest.mark.slow

MODEL = {"model": "gru", "embedding_size": 4, "hidden_size": 4, "num_layers": 1}
STEPS = {"batch_size": 4, "sequence_length": 10, "steps": 4}
PRIVATE = {"mitigation": "dp", "noise_multiplier": 2.0, **STEPS}
ROWS = documents(num_documents=120, num_users=40)
ONE_MORE = [*ROWS, {"user": "user 40", "text": "cat dog eel fox gnu hen ibis jay"}]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A public vocabulary: nobody of the corpus wrote the text that it was learnt from."""
    made = tightlip.prepare(other_peoples_documents(), tmp_path_factory.mktemp("p") / "p")
    return {"tokenizer": str(made.tokenizer_folder), "split": "none"}


def last_month(words, folder, **settings):
    return tightlip.train(ROWS, folder / "last", prepare=words, **MODEL, **(settings or PRIVATE))


def this_month(words, folder, model=None, **settings):
    start = MODEL if model is None else {"model": str(model)}
    return tightlip.train(
        ONE_MORE, folder / "this", prepare=words, **{**start, **PRIVATE, **settings}
    )


def together(*runs):
    """Oracle: dp-accounting composes the runs' own noise, rates and steps."""
    accountant = PLDAccountant()
    for run in runs:
        noise, rate = run.guarantee["noise_multiplier"], run.guarantee["sampling_rate"]
        accountant = theirs(accountant, noise, rate, run.guarantee["steps"])
    return accountant.get_epsilon(min(run.guarantee["delta"] for run in runs))


@pytest.mark.parametrize("where", ["in its run", "copied, its run and the register gone"])
def test_last_months_private_model_costs_its_people_what_it_cost_them(
    where, words, tmp_path, register, monkeypatch
):
    last = last_month(words, tmp_path)
    model = last.model_folder
    if where != "in its run":
        model = shutil.copytree(model, tmp_path / "copy")
        shutil.rmtree(last.folder)
        monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "another register"))
    this = this_month(words, tmp_path, model)
    people = this.guarantee["people"]
    assert people["runs"] == 2
    assert people["epsilon"] == pytest.approx(together(last, this), rel=1e-3)
    assert people["epsilon"] > 1.1 * this.guarantee["epsilon"]
    assert people["standing"] == "as published"
    card = (this.model_folder / "README.md").read_text()
    first = card.index("over 2 registered runs")
    assert first < card.index("this run alone")
    # A third run knows of the first from this card alone.
    before = json.loads((this.model_folder / "guarantee.json").read_text())["before"]
    assert [run["run"] for run in before] == [last.guarantee["run"]]


def test_two_runs_on_one_file_are_of_the_same_people_though_each_prepares_it(words, tmp_path):
    runs = [
        tightlip.train(ROWS, tmp_path / name, prepare=words | more, **MODEL, **PRIVATE)
        for name, more in (("one", {}), ("two", {"scrub": True}))
    ]
    assert runs[0].guarantee["people"]["runs"] == 1
    assert runs[1].guarantee["people"]["epsilon"] == pytest.approx(together(*runs), rel=1e-3)
    assert tightlip.ledger(runs[0])["people"]["epsilon"] == pytest.approx(together(*runs), rel=1e-3)


def test_what_is_cut_out_of_a_corpus_or_planted_in_it_has_its_people(words, tmp_path):
    whole = tightlip.prepare(ROWS, tmp_path / "whole", tokenizer=words["tokenizer"], split="text")
    part = tightlip.prepare(whole.folder / "validation.parquet", tmp_path / "part", **words)
    tightlip.plant_canaries(
        whole.folder / "train.parquet", tmp_path / "planted",
        templates=["{digits:4}"], repetitions=[2], num_words=20,
    )  # fmt: skip
    planted = tightlip.prepare(tmp_path / "planted/corpus.parquet", tmp_path / "again", **words)
    other = tightlip.prepare(ONE_MORE, tmp_path / "other", **words)
    told = tightlip.prepare(ONE_MORE, tmp_path / "told", people=str(whole.folder), **words)
    ids = people_of(whole.folder)
    assert len(ids) == 1
    assert people_of(part.folder) == people_of(planted.folder) == ids
    assert people_of(other.folder) != ids
    assert {*ids} <= {*people_of(told.folder)}


def test_on_the_users_word_a_new_corpus_is_of_the_same_people(words, tmp_path):
    last = last_month(words, tmp_path)
    # Another file may be the same people's, and counts until somebody declares that it is not.
    assert this_month(words, tmp_path / "a").guarantee["people"]["runs"] == 2
    declared = words | {"other_people": True}
    rows = [{"user": "user 77", "text": "dog elk"}, *ONE_MORE[1:]]
    alone = tightlip.train(rows, tmp_path / "c", prepare=declared, **MODEL, **PRIVATE)
    assert alone.guarantee["people"]["runs"] == 1
    assert "2 corpora registered here that you declared to be of other people" in str(
        alone.guarantee["outside"]
    )
    said = words | {"people": str(last.corpus_folder)}
    rows = [*ONE_MORE, {"user": "user 41", "text": "ant cat"}]
    this = tightlip.train(rows, tmp_path / "b", prepare=said, **MODEL, **PRIVATE)
    assert this.guarantee["people"]["id"] == last.guarantee["people"]["id"]
    assert this.guarantee["people"]["runs"] == 3  # and not of those who were declared others


def test_a_vocabulary_of_nearly_the_same_text_is_refused_and_a_noisy_one_is_charged(tmp_path):
    learnt = tightlip.prepare(ROWS, tmp_path / "learnt", split="none")
    given = {"tokenizer": str(learnt.tokenizer_folder), "split": "none"}
    with pytest.raises(GuaranteeError, match="vocabulary was learnt from nearly the same text"):
        this_month(given, tmp_path)
    lowered = this_month(given, tmp_path, allow_unproved=True)
    assert lowered.guarantee["standing"] == "as published"
    assert not re.search(r"\b1[12]\d\b", lowered.guarantee["because"])  # nor how many are shared

    noisy = tightlip.prepare(ROWS, tmp_path / "noisy", vocabulary_noise=0.5, split="none")
    charged = this_month({**given, "tokenizer": str(noisy.tokenizer_folder)}, tmp_path / "n")
    assert [each["name"] for each in charged.guarantee["releases"]] == ["vocabulary"]
    assert charged.guarantee["standing"] == "proved"


@pytest.mark.parametrize("how", ["told of elsewhere", "its corpus is gone", "it was a copy"])
@pytest.mark.parametrize("noise", [{}, {"vocabulary_noise": 0.5}])
def test_words_are_traced_from_another_folder_and_when_their_corpus_is_gone(
    how, noise, tmp_path, monkeypatch
):
    """The path of a tokenizer is kept as it was given, and may lead nowhere when training begins."""
    monkeypatch.chdir(tmp_path)
    learnt = tightlip.prepare(ROWS, "learnt", split="none", **noise)
    given = "learnt/tokenizer"
    if how == "it was a copy":
        last = tightlip.train(learnt, "last", **MODEL, **STEPS)
        given = str(shutil.copytree(last.model_folder, "copy"))
    tightlip.prepare(ONE_MORE, "this", tokenizer=given, split="none")
    (tmp_path / "elsewhere").mkdir()
    if how == "its corpus is gone":
        shutil.rmtree("learnt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    if noise and how == "told of elsewhere":
        run = tightlip.train("../this", "run", **MODEL, **PRIVATE)
        assert [each["name"] for each in run.guarantee["releases"]] == ["vocabulary"]
        return
    with pytest.raises(GuaranteeError, match=OPENLY):
        tightlip.train("../this", "run", **MODEL, **PRIVATE)


def test_words_that_other_text_brought_without_noise_are_said_to_be_so(tmp_path):
    """Noisy ones of the same text are charged."""
    made = tightlip.prepare(other_peoples_documents(), tmp_path / "p")
    words = {"tokenizer": str(made.tokenizer_folder), "split": "none"}
    outside = " ".join(last_month(words, tmp_path).guarantee["outside"])
    assert "words were learnt without noise from other text that may be of the same" in outside
    declared = last_month(words | {"other_people": True}, tmp_path / "declared")
    assert "learnt without noise" not in " ".join(declared.guarantee["outside"])


def test_noisy_words_of_other_text_are_charged_until_its_people_are_declared_others(tmp_path):
    """As runs on other text are: the users may be the same. Found with none of it in any figure."""
    noisy = tightlip.prepare(ROWS, tmp_path / "noisy", vocabulary_noise=0.5, split="none")
    given = {"tokenizer": str(noisy.tokenizer_folder), "split": "none"}
    other = [{"user": f"user {n}", "text": " ".join(WORDS[n % 8 :: 3])} for n in range(40)]

    def train(name, rows=other, prepare=None, **settings):
        made = given | (prepare or {})
        return tightlip.train(rows, tmp_path / name, prepare=made, **MODEL, **PRIVATE, **settings)

    charged = train("charged").guarantee
    assert [each["name"] for each in charged["releases"]] == ["vocabulary"]
    assert charged["standing"] == "proved"
    (release,) = noisy.releases
    oracle = theirs(PLDAccountant(), release["noise_multiplier"], 1.0, 1)
    noise, rate = charged["noise_multiplier"], charged["sampling_rate"]
    oracle = theirs(oracle, noise, rate, charged["steps"])
    told = charged["delta"] - release["delta"]
    assert charged["epsilon"] == pytest.approx(oracle.get_epsilon(told), rel=1e-3)
    declared = train("declared", other[1:], {"other_people": True}).guarantee
    assert declared["releases"] == []
    assert declared["epsilon"] < charged["epsilon"]
    # A document of this text is none of that one.
    assert train("examples", other[2:], unit="example").guarantee["releases"] == []


def test_what_a_start_learnt_openly_from_other_text_is_said_as_it_is(words, tmp_path, caplog):
    plain = last_month(words, tmp_path, **STEPS)
    rows = [{"user": f"user {n}", "text": " ".join(WORDS[n % 8 :: 3])} for n in range(40)]
    start = {"model": str(plain.model_folder)} | PRIVATE
    told = "learnt other text without privacy that may be of the same people"
    run = tightlip.train(rows, tmp_path / "this", prepare=words, **start)
    assert told in caplog.text
    assert told in str(run.guarantee["outside"])
    assert "not to be found" not in caplog.text  # it stands, and was compared
    others = tightlip.train(
        rows[1:], tmp_path / "others", prepare=words | {"other_people": True}, **start
    )
    assert told not in str(others.guarantee["outside"])


@pytest.mark.parametrize("where", ["in its run", "copied"])
def test_weights_trained_without_privacy_on_nearly_the_same_text_are_refused(
    where, words, tmp_path
):
    last = last_month(words, tmp_path, **STEPS)
    model = last.model_folder
    if where == "copied":  # of another part of the same text: known by the people's id
        model = shutil.copytree(model, tmp_path / "copy")
        shutil.rmtree(last.folder)
        with pytest.raises(GuaranteeError, match="trained without privacy on this very corpus"):
            tightlip.train(ROWS, tmp_path / "this", prepare=words, model=str(model), **PRIVATE)
        return
    with pytest.raises(GuaranteeError, match="trained without privacy on nearly the same text"):
        this_month(words, tmp_path, model)
    lowered = this_month(words, tmp_path, model, allow_unproved=True)
    assert lowered.guarantee["standing"] == "as published"


OPENLY = (
    r"(trained without privacy on|vocabulary was learnt from) (nearly the same|registered) text"
)


@pytest.mark.parametrize("text", ["stands", "is gone", "is not whole"])
@pytest.mark.parametrize("used", ["model", "tokenizer", "tokenizer of a corpus with that one"])
def test_a_copy_of_a_model_is_traced_by_the_register(used, text, words, tmp_path, caplog):
    """Its ids are all that a copy tells: trained on the same text but for one document."""
    own_words = {} if used == "model" else {"prepare": {"split": "none"}}
    last = tightlip.train(
        ROWS, tmp_path / "last", **{"prepare": words} | own_words, **MODEL, **STEPS
    )
    copy = str(shutil.copytree(last.model_folder, tmp_path / "copy"))
    if used != "model":
        if "corpus" in used:
            rows = other_peoples_documents(seed=5)
            handed_on = tightlip.prepare(rows, tmp_path / "on", tokenizer=copy, split="none")
            copy = str(handed_on.tokenizer_folder)
        words = {"tokenizer": copy, "split": "none"}
    if text == "is gone":
        shutil.rmtree(last.folder)
    if text == "is not whole":
        (last.folder / "corpus" / "train.parquet").unlink()
    start = {"model": copy} if used == "model" else MODEL

    def train(name, rows=ONE_MORE, **settings):
        given = {"prepare": words | settings.pop("prepare", {})}
        return tightlip.train(rows, tmp_path / name, **given, **start, **PRIVATE, **settings)

    with pytest.raises(GuaranteeError, match=OPENLY):
        train("this")
    assert train("lowered", allow_unproved=True).guarantee["standing"] == "as published"
    others = [{"user": f"s{n}", "text": " ".join(WORDS[n % 8 :: 3])} for n in range(40)]
    if text == "stands":  # a stranger's text is compared with it, and nothing is left to say
        strangers = train("strangers", rows=others)
    else:
        with pytest.raises(GuaranteeError, match=r"not at .*last.* \(prepare it there again"):
            train("strangers", rows=others)
        caplog.clear()
        strangers = train("declared", rows=others[1:], prepare={"other_people": True})
        assert "taken to be public: the text is not to be found from here" in caplog.text
    assert strangers.guarantee["standing"] == "proved"
    outside = " ".join(strangers.guarantee["outside"])
    assert ("not to be found from here" in outside) == (text != "stands")


def test_a_copy_whose_text_another_register_knows_is_told_of(words, tmp_path, caplog, monkeypatch):
    last = tightlip.train(ROWS, tmp_path / "last", prepare={"split": "none"}, **MODEL, **STEPS)
    copy = shutil.copytree(last.model_folder, tmp_path / "copy")
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "another register"))
    this_month({"tokenizer": str(copy), "split": "none"}, tmp_path)
    assert f"tokenizer {copy} is taken to be public: the text is not to be found" in caplog.text


@pytest.mark.parametrize("used", ["model", "tokenizer"])
def test_a_few_texts_that_a_start_was_made_of_too_have_no_promise(used, words, tmp_path, caplog):
    shared = "ant cat eel gnu ibis kite bee dog fox hen"  # no run of `documents`
    others = [*other_peoples_documents(seed=4), {"user": "o", "text": shared}]
    made = {"split": "none"} if used == "tokenizer" else words
    plain = tightlip.train(others, tmp_path / "plain", prepare=made, **MODEL, **STEPS)
    start = {"prepare": {"tokenizer": str(plain.model_folder), "split": "none"}, **MODEL}
    if used == "model":
        start = {"prepare": words, "model": str(plain.model_folder)}
    rows = [*ROWS, {"user": "user 41", "text": shared}]
    run = tightlip.train(rows, tmp_path / "run", **start, **PRIVATE)
    (warned,) = [each for each in caplog.records if "Texts in both have no promise" in each.message]
    assert warned.levelname == "WARNING"
    assert warned.message.startswith("1 of the")
    assert run.guarantee["standing"] == "proved"
    told = "texts of this corpus that also stand in what the start or its words were made from"
    assert told in run.guarantee["outside"]


def test_vocabularies_that_no_run_was_trained_with_are_said_to_be_counted_nowhere(tmp_path):
    told = "noisy vocabularies of this text that no run was trained with"
    for noise, is_told in ((0.5, True), (None, False)):
        public = {"tokenizer": str(tightlip.prepare(ROWS, tmp_path / "p").tokenizer_folder)}
        prepare = {"vocabulary_noise": noise} if noise else public
        rows = ROWS if noise else other_peoples_documents()
        run = tightlip.train(
            rows, tmp_path / f"{noise}", prepare={"split": "none", **prepare}, **MODEL, **PRIVATE
        )
        assert (told in run.guarantee["outside"]) == is_told


def test_a_private_run_behind_a_plain_one_still_counts(words, tmp_path):
    """Plain training on a stranger's text between two private runs hides neither."""
    first = last_month(words, tmp_path)
    between = tightlip.train(
        other_peoples_documents(seed=4), tmp_path / "plain", prepare=words,
        model=str(first.model_folder), **STEPS,
    )  # fmt: skip
    model = shutil.copytree(between.model_folder, tmp_path / "copy")
    last = this_month(words, tmp_path, model)
    assert last.guarantee["people"]["epsilon"] == pytest.approx(together(first, last), rel=1e-3)


def test_a_model_of_unknown_history_is_said_to_be_one(words, tmp_path, caplog):
    known = last_month(words, tmp_path, **STEPS)
    stranger = shutil.copytree(known.model_folder, tmp_path / "stranger")
    unlisted(stranger / "guarantee.json").unlink()
    rows = [{"user": f"s{n}", "text": " ".join(WORDS[n % 12 :: 3])} for n in range(40)]
    run = tightlip.train(rows, tmp_path / "run", prepare=words, model=str(stranger), **PRIVATE)
    for told in (caplog.text, " ".join(run.guarantee["outside"])):
        assert f"{stranger}" in told
        assert "it has no guarantee.json and stands in no run" in told


def test_nothing_published_holds_a_hash_of_private_text(words, tmp_path):
    """All hashes here have 64 digits; a model folder's own checksums are of what it publishes."""
    plain = last_month(words, tmp_path, **STEPS)
    private = this_month(words, tmp_path / "p")
    after = tightlip.train(
        ROWS, tmp_path / "after", prepare=words, model=str(plain.model_folder), **STEPS
    )
    for run in (plain, private, after):
        models = [run.model_folder, *(snapshot.folder for snapshot in run.snapshots)]
        assert len(models) > 1
        files = [path for model in models for path in model.rglob("*.json")]
        files += [model / "README.md" for model in models]
        for path in files:
            assert not re.findall(r"\b[0-9a-f]{64}\b", path.read_text()), path
        known = (run.folder / "config.toml").read_text()
        assert re.findall(r"\b[0-9a-f]{64}\b", known)  # which is its owner's


def test_a_run_that_was_stopped_early_promises_what_it_planned(words, tmp_path, monkeypatch):
    whole = last_month(words, tmp_path)
    plain = Training.take_step

    def stopped(self):
        if self.progress.step == 2:
            raise KeyboardInterrupt
        plain(self)

    monkeypatch.setattr(Training, "take_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        last_month(words, tmp_path / "again")
    there = tightlip.ledger(tmp_path / "again/last")
    assert there["epsilon"] == whole.guarantee["epsilon"] > there["epsilon_so_far"]
    assert (there["steps"], there["planned_steps"]) == (2, 4)
    # Both of them are on these people, the one that was stopped at its plan.
    assert there["people"]["epsilon"] == pytest.approx(together(whole, whole), rel=1e-3)


def test_no_private_run_starts_where_it_cannot_be_registered(words, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(tmp_path / "folder"))
    assert last_month(words, tmp_path, **STEPS).finished  # plain training needs none
    with pytest.raises(GuaranteeError, match="before its first step"):
        this_month(words, tmp_path)
    assert not (tmp_path / "this").exists()


def test_a_card_says_proved_only_beside_the_arithmetic(words, tmp_path):
    run = last_month(words, tmp_path)
    for arithmetic, said in (
        ("exact: units never meet in floating point", "proved; exact"),
        (None, "proved; arithmetic not recorded"),
    ):
        card = model_card(run.guarantee | {"arithmetic": arithmetic})
        assert card.lower().count("proved") == card.lower().count(said) > 0


def test_a_card_without_a_joint_epsilon_says_so_before_it_says_what_is_proved(words, tmp_path):
    last_month(words, tmp_path, **PRIVATE, unit="user")
    run = this_month(words, tmp_path, unit="example")
    first = model_card(run.guarantee).split("tightlip\n\n")[1]
    assert first.startswith("No ε for the people of all 2 registered runs")
    assert "a figure as published" not in first


def test_runs_of_ones_own_loop_are_counted_under_a_name_of_ones_own(tmp_path):
    torch.manual_seed(0)
    documents = [torch.randint(0, 16, (6,)) for _ in range(40)]

    def trained(name, **people):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1))
        private = PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.1), documents,
            ledger=tmp_path / name, noise_multiplier=1.0, expected_batch=4, steps=3, **people,
        )  # fmt: skip
        while private.has_budget():
            private.step()
        return private.guarantee()

    first, second = trained("one", people="customers"), trained("two", people="customers")
    assert "people" not in trained("three")
    assert (first["people"]["runs"], second["people"]["runs"]) == (1, 2)
    both = theirs(PLDAccountant(), 1.0, 0.1, 6).get_epsilon(second["delta"])
    assert second["people"]["epsilon"] == pytest.approx(both, rel=1e-3)
