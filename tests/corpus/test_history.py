"""What a corpus came through stays with its files, and a split by text asks each document alone."""

import shutil

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tightlip
from by_hand import unlisted
from tightlip.core.errors import GuaranteeError
from tightlip.corpus.history import Origin, history_of, origin_of, people_of
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.prepare_config import Splitter, held_out_text
from tightlip.corpus.readers import open_corpus

pytestmark = pytest.mark.slow

ROWS = [{"user": f"u{n % 12}", "text": f"w{n % 7} w{n % 5} w{n % 3} x{n}"} for n in range(120)]
TINY = {"embedding_size": 4, "hidden_size": 4, "num_layers": 1, "batch_size": 8, "steps": 1}
PRIVATE = {"mitigation": "dp", "noise_multiplier": 1.0, **TINY}


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A vocabulary of other text."""
    rows = [{"user": "p", "text": f"w{n % 9} v{n}"} for n in range(40)]
    return tightlip.prepare(rows, tmp_path_factory.mktemp("public") / "p", split="none")


def cut(folder, **settings):
    return tightlip.prepare(ROWS, folder / "cut", **settings).folder / "train.parquet"


def standing_of(corpus, folder, **settings):
    run = tightlip.train(corpus, folder / "run", **PRIVATE, **settings)
    return run.guarantee["standing"]


documents = st.lists(
    st.tuples(st.sampled_from(["ann", "bob"]), st.text(max_size=8)), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(documents=documents, seed=st.integers(0, 2**70), left_out=st.integers(0, 29))
def test_a_split_by_text_asks_each_document_alone(documents, seed, left_out):
    def held(rows):
        splitter = Splitter({}, split="text", holdout=0.3, seed=seed)
        return {row: splitter.is_held_out(*row) for row in rows}

    fewer = documents[:left_out] + documents[left_out + 1 :]
    whole, part = held(documents), held(fewer)
    assert all(whole[row] == part[row] for row in part)


@pytest.mark.parametrize("holdout", [0.05, 0.5, 0.9])
def test_a_split_by_text_holds_out_about_the_share(holdout):
    num = 4000
    out = sum(held_out_text("ann", f"text {n}", holdout=holdout, seed=3) for n in range(num))
    assert abs(out - holdout * num) < 5 * (num * holdout * (1 - holdout)) ** 0.5


def test_the_parts_of_a_prepared_corpus_say_how_they_were_cut(tmp_path):
    train = cut(tmp_path, split="document", deduplicate="documents")
    (step,) = history_of(train)
    assert (step["split"], step["deduplicate"]) == ("document", "documents")
    assert step["source_fingerprint"] == open_corpus(ROWS).fingerprint()
    assert history_of(train.with_name("validation.parquet")) == [step]


def test_a_corpus_that_was_never_prepared_has_no_history(tmp_path):
    pq.write_table(
        pq.read_table(cut(tmp_path)).replace_schema_metadata(None), tmp_path / "x.parquet"
    )
    assert history_of(tmp_path / "x.parquet") == history_of(ROWS) == []


def test_canaries_are_planted_with_the_history(tmp_path):
    train = cut(tmp_path)
    tightlip.plant_canaries(
        train, tmp_path / "planted", templates=["{digits:4}"], repetitions=[2], num_words=20
    )
    assert history_of(tmp_path / "planted/corpus.parquet") == history_of(train) != []
    again = tightlip.prepare(tmp_path / "planted/corpus.parquet", tmp_path / "again")
    assert open_prepared(again.folder).history == history_of(train)
    assert len(history_of(again.folder / "train.parquet")) == 2


@pytest.mark.parametrize(
    ("unit", "split", "deduplicate", "said"),
    [
        ("example", "document", "none", "split=.document. before this corpus was cut out"),
        ("example", "user", "none", "split=.user."),
        ("user", "user", "none", "split=.user."),
        ("user", "document", "documents", "deduplicate=.documents. before"),
    ],
)
def test_what_is_refused_directly_is_refused_on_a_part_that_was_cut_so(
    unit, split, deduplicate, said, public, tmp_path
):
    train = cut(tmp_path, split=split, deduplicate=deduplicate)
    prepare = {"tokenizer": str(public.tokenizer_folder), "split": "none"}
    with pytest.raises(GuaranteeError, match=said):
        tightlip.train(train, tmp_path / "run", prepare=prepare, unit=unit, **PRIVATE)


@pytest.mark.parametrize(
    ("unit", "split"), [("example", "text"), ("user", "text"), ("user", "document")]
)
def test_parts_cut_by_each_text_alone_stay_proved(unit, split, public, tmp_path):
    train = cut(tmp_path, split=split)
    held = train.with_name("validation.parquet")
    prepare = {"tokenizer": str(public.tokenizer_folder), "validation": str(held)}
    assert standing_of(train, tmp_path, prepare=prepare, unit=unit) == "proved"
    assert standing_of(
        ROWS, tmp_path / "raw", prepare={"tokenizer": prepare["tokenizer"], "split": split}, unit=unit
    ) == "proved"  # fmt: skip


@pytest.mark.parametrize("through", ["the same text", "a part of it", "another's tokenizer"])
def test_a_vocabulary_learnt_from_the_same_text_is_found_wherever_it_lies(through, tmp_path):
    train = cut(tmp_path, split="text")
    tokenizer = tmp_path / "cut/tokenizer"
    if through == "another's tokenizer":
        second = tightlip.prepare(ROWS, tmp_path / "second", tokenizer=str(tokenizer))
        tokenizer = second.tokenizer_folder
    source = ROWS if through == "the same text" else train
    with pytest.raises(GuaranteeError, match="learnt from this corpus"):
        tightlip.train(
            source, tmp_path / "run", prepare={"tokenizer": str(tokenizer), "split": "none"},
            unit="user", **PRIVATE,
        )  # fmt: skip


def test_a_noisy_vocabulary_of_the_same_text_is_charged_where_it_is_used_again(tmp_path):
    first = tightlip.prepare(ROWS, tmp_path / "first", vocabulary_noise=1.0, split="none")
    again = tightlip.prepare(
        ROWS, tmp_path / "again", tokenizer=str(first.tokenizer_folder), split="none"
    )
    assert again.releases == first.releases != []
    run = tightlip.train(again, tmp_path / "run", unit="user", **PRIVATE)
    assert [release["name"] for release in run.guarantee["releases"]] == [
        release["name"] for release in first.releases
    ]


@pytest.mark.parametrize("name", ["cut.pq", "CUT.PARQUET", "folder/cut.parquet"])
def test_the_history_is_read_whatever_the_files_are_called(name, tmp_path):
    train = cut(tmp_path)
    copy = tmp_path / "copy" / name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(train.read_bytes())
    given = copy.parent if "/" in name else copy
    assert history_of(given) == history_of(train) != []


def test_a_vocabulary_learnt_from_the_same_text_is_found_in_a_run_too(tmp_path):
    train = cut(tmp_path, split="text")
    run = tightlip.train(tmp_path / "cut", tmp_path / "plain", **TINY)
    for tokenizer in (run.model_folder, run.snapshots[-1].folder if run.snapshots else run.folder):
        if not (tokenizer / "tokenizer.json").is_file():
            continue
        again = tightlip.prepare(
            train, tmp_path / f"again-{tokenizer.name}", tokenizer=str(tokenizer), split="none"
        )
        assert again.learnt_vocabulary


def test_weights_of_another_part_of_the_same_text_are_no_public_start(public, tmp_path):
    settings = {"tokenizer": str(public.tokenizer_folder)}
    plain = tightlip.train(ROWS, tmp_path / "plain", prepare=settings | {"split": "user"}, **TINY)
    shapeless = {
        name: PRIVATE[name] for name in PRIVATE if "size" not in name or name == "batch_size"
    }
    shapeless.pop("num_layers")
    with pytest.raises(GuaranteeError, match="another part of the same text"):
        tightlip.train(
            ROWS, tmp_path / "private", prepare=settings | {"split": "none"}, unit="user",
            model=str(plain.model_folder), **shapeless,
        )  # fmt: skip


def test_weights_are_followed_through_runs_that_went_on_from_others(public, tmp_path):
    settings = {"tokenizer": str(public.tokenizer_folder), "split": "none"}
    others = [{"user": f"o{n % 5}", "text": f"w{n % 9} w{n % 4}"} for n in range(40)]
    first = tightlip.train(ROWS, tmp_path / "first", prepare=settings, **TINY)
    goes_on = {"batch_size": 8, "steps": 1}
    second = tightlip.train(
        others, tmp_path / "second", prepare=settings, model=str(first.model_folder), **goes_on
    )
    # Models of an earlier version say nothing of their text: the runs themselves are followed.
    for run in (first, second):
        unlisted(run.model_folder / "guarantee.json").unlink()
    with pytest.raises(GuaranteeError, match="another part of the same text"):
        tightlip.train(
            ROWS, tmp_path / "private", prepare=settings, unit="user", mitigation="dp",
            noise_multiplier=1.0, model=str(second.model_folder), **goes_on,
        )  # fmt: skip


def test_a_vocabulary_is_followed_through_corpora_that_were_given_it(tmp_path):
    learnt = tightlip.prepare(ROWS, tmp_path / "a", split="none")
    others = [{"user": "o", "text": f"w{n % 9} w{n % 4}"} for n in range(40)]
    handed_on = tightlip.prepare(
        others, tmp_path / "b", tokenizer=str(learnt.tokenizer_folder), split="none"
    )
    again = tightlip.prepare(
        ROWS, tmp_path / "c", tokenizer=str(handed_on.tokenizer_folder), split="none"
    )
    assert not handed_on.learnt_vocabulary
    assert again.learnt_vocabulary


def test_somebodys_own_config_nearby_is_no_run(public, tmp_path):
    (tmp_path / "config.toml").write_text('name = "mine"\n', encoding="utf-8")
    shutil.copytree(public.tokenizer_folder, tmp_path / "models/mine")
    made = tightlip.prepare(
        ROWS, tmp_path / "p", tokenizer=str(tmp_path / "models/mine"), split="none"
    )
    assert not made.learnt_vocabulary


def test_a_copy_of_a_model_tells_what_its_run_knew_and_a_strangers_tells_nothing(public, tmp_path):
    settings = {"tokenizer": str(public.tokenizer_folder), "split": "none"}
    first = tightlip.train(ROWS, tmp_path / "first", prepare=settings, **TINY)
    copy = shutil.copytree(first.model_folder, tmp_path / "copy")
    known, ids = origin_of(first.model_folder), {*people_of(first.corpus_folder)}
    shutil.rmtree(first.folder)
    told = origin_of(copy)
    assert ids <= told.openly == told.learnt <= known.learnt
    assert open_corpus(ROWS).fingerprint() in known.openly - told.openly
    assert {*people_of(public.folder)} <= told.words <= known.words
    assert known.folders
    assert not told.folders
    unlisted(copy / "guarantee.json").unlink()
    assert origin_of(copy) == Origin()


def test_a_private_start_from_a_copied_model_of_the_text_is_found(public, tmp_path):
    settings = {"tokenizer": str(public.tokenizer_folder), "split": "none"}
    first = tightlip.train(ROWS, tmp_path / "first", prepare=settings, **TINY)
    copy = shutil.copytree(first.model_folder, tmp_path / "copy")
    shutil.rmtree(first.folder)
    with pytest.raises(GuaranteeError, match="another part of the same text"):
        tightlip.train(
            ROWS, tmp_path / "private", prepare=settings, unit="user", mitigation="dp",
            noise_multiplier=1.0, model=str(copy), batch_size=8, steps=1,
        )  # fmt: skip
