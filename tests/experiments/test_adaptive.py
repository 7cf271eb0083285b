"""The experiment of adaptive DP from end to end, with few texts and a step or two of training."""

import csv
import dataclasses
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tightlip
import tightlip.experiments.adaptive_paper as reproduce
import tightlip.experiments.adaptive_text as adaptive_text
from tightlip.core.checksums import LIST
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import open_run
from tightlip.corpus.bundled import demo_corpus
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.privacy_weights import read_weights
from tightlip.experiments.adaptive_paper import nats_per_token, thirds
from tightlip.experiments.adaptive_tables import PAPER, epsilon_words, find, groups
from tightlip.experiments.adaptive_text import (
    carriers,
    chosen_unit,
    copied,
    source_of,
)
from tightlip.report.kit import render_page
from tightlip.scan.options import ScanOptions
from tightlip.scan.scans import Scans
from tightlip.scan.store import ScanStore
from tightlip.training.config import RunOptions, TrainConfig

pytestmark = pytest.mark.slow

TINY = {"model": "lstm", "embedding_size": 4, "hidden_size": 4, "num_layers": 1}
SHORT = {"sequence_length": 16}
SIZE = dataclasses.replace(
    reproduce.SCALES["smoke"],
    shape=TINY | SHORT,
    plain={"learning_rate": 1e-2, "batch_size": 8, "steps": 2},
    private={"learning_rate": 1e-2, "batch_size": 8, "steps": 2, "rows_per_unit": 1},
    public=TINY | SHORT | {"batch_size": 8, "steps": 2},
    vocabulary_size=300,
    repetitions=(1, 2),
    num_carriers=6,
    carrier_repetitions=1,
    noise_multipliers=(1.0,),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A corpus without users and a public one, of short speeches."""
    folder = tmp_path_factory.mktemp("files")
    texts = [text for text in demo_corpus()["text"].to_pylist() if 4 < len(text.split()) < 15]
    pq.write_table(pa.table({"text": ["", *texts[:160]]}), folder / "mine.parquet")
    pq.write_table(pa.table({"text": texts[200:300]}), folder / "open.parquet")
    return folder


@pytest.fixture(scope="module")
def made(files, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reproduce.SCALES, "smoke", SIZE)
        # A million numbers to rank against are ten seconds a run.
        patch.setattr(adaptive_text, "IDENTITY", "My ID is {digits:3}")
        out = tmp_path_factory.mktemp("out") / "out"
        yield tightlip.reproduce_adaptive([files / "mine.parquet"], public_corpus=files / "open.parquet", out=out)  # fmt: skip


def section(made):
    return made.result["corpora"][0]


def test_every_way_is_there_with_its_standing(made):
    standings = {row["run"]: row["standing"] for row in section(made)["rows"]}
    assert standings == {
        "none": "measured only",
        "dp-1": "proved",
        "clip-1": "proved",
        "scale-1": "proved",
        "as-published-1": "as published",
        "scale-1-equal": "proved",
        "as-published-1-equal": "as published",
    }


def test_at_equal_epsilon_nobody_proved_spends_more_than_plain_dp(made):
    rows = section(made)["rows"]
    plain, clip, scale = (
        find(rows, way, 1.0, "equal epsilon")["epsilon"] for way in ("dp", "clip", "scale")
    )
    assert clip == plain
    assert scale <= plain


def test_steps_and_why_training_ended_are_those_of_the_run(made):
    for row in section(made)["rows"]:
        run = open_run(made.folder / "mine" / "runs" / row["run"])
        assert row["steps"] == run.guarantee.get("steps")
        assert row["stop"] == run.stop
        if row["mode"] == "scale":
            assert row["planned_steps"] == 2
            charged = (run.folder / "noise_scales.jsonl").read_text(encoding="utf-8").splitlines()
            assert row["last_noise_multiplier"] == json.loads(charged[-1])["noise_multiplier"]


def test_a_cpu_is_asked_for_nothing_that_is_for_a_gpu():
    assert reproduce._options(reproduce.SCALES["paper"], "cpu") == RunOptions(device="cpu")


def scores_by(model, held, folder):
    scans = Scans(store=ScanStore(folder), options=ScanOptions(device="cpu"))
    return scans.scores(model, held, "Held-out text")


def test_losses_are_those_of_a_pass_over_the_held_out_text(made, tmp_path):
    """The probe holds all held-out text here, so its loss is that of the corpus' own part."""
    folder = made.folder / "mine"
    held = open_prepared(folder / "corpus").validation
    scores = scores_by(folder / "runs" / "dp-1" / "model", held, tmp_path)
    wanted = scores.loss_nats.sum() / scores.num_tokens.sum()
    row = find(section(made)["rows"], "dp", 1.0, "same noise")
    assert row["loss_nats"] == pytest.approx(wanted, rel=1e-5)
    assert row["perplexity"] == pytest.approx(np.exp(wanted), rel=1e-5)


def test_what_a_third_pays_is_its_loss_beyond_no_dp(made):
    none, *others = section(made)["rows"]
    for row in others:
        for own, plain in zip(row["thirds"], none["thirds"], strict=True):
            assert own["cost_nats"] == own["loss_nats"] - plain["loss_nats"]


def test_canaries_are_weighed_as_they_stand_in_the_corpus(made):
    folder = made.folder / "mine"
    key = json.loads((folder / "carried" / "key.json").read_text(encoding="utf-8"))
    texts = pq.read_table(folder / "corpus" / "train.parquet")["text"].to_pylist()
    weights = read_weights(folder / "corpus")
    places = [texts.index(canary["text"]) for canary in key["canaries"]]
    by_surprise = sorted(places, key=lambda place: weights.log_perplexities[place])
    rho = weights.rho[by_surprise]
    found = [each["mean_rho"] for each in section(made)["rows"][0]["exposure_by_third"]]
    assert found == pytest.approx([rho[at : at + 2].mean() for at in (0, 2, 4)])


def test_files_hold_no_text(made, files):
    words = set()
    for name in ("mine", "open"):
        for text in pq.read_table(files / f"{name}.parquet")["text"].to_pylist():
            words |= {word for word in re.findall(r"\w+", text) if len(word) > 8}
    for name in ("adaptive.json", "adaptive.csv", "adaptive.html"):
        said = re.findall(r"\w+", (made.folder / name).read_text(encoding="utf-8"))
        assert not words & set(said)
        assert "My ID is" not in " ".join(said)


def test_the_csv_has_a_line_a_run_and_the_same_figures(made):
    lines = list(csv.DictReader((made.folder / "adaptive.csv").open(encoding="utf-8")))
    rows = section(made)["rows"]
    assert [line["run"] for line in lines] == [row["run"] for row in rows]
    assert [float(line["perplexity"]) for line in lines] == [row["perplexity"] for row in rows]
    assert {"exposure_bits_1", "cost_nats_rare", "kept_nats_ordinary"} <= lines[0].keys()


def test_the_page_has_a_standing_beside_every_epsilon(made):
    page = made.page.read_text(encoding="utf-8")
    for _, _, rows in groups(section(made)):
        for row in rows:
            beside = f">{epsilon_words(row)}<small>"
            at = [match.end() for match in re.finditer(re.escape(beside), page)]
            assert at
            assert any(row["standing"] in page[place : place + 60] for place in at)
    assert not re.search(r"<script|https?:", page)


def test_the_papers_own_table_is_on_the_page(made):
    page = made.page.read_text(encoding="utf-8")
    for row in PAPER:
        assert f"{row['perplexity']:,.2f}" in page
    assert "do not convert" in page
    assert "theirs 0.58; ours: mine" in page


def test_given_again_it_goes_on_where_it_stopped(made, files):
    """As after a kill: results and one measure are gone, runs and other measures stay."""
    before = {path: path.stat().st_mtime_ns for path in made.folder.rglob("*") if path.is_file()}
    gone = [made.page, made.folder / "mine" / "measured" / "clip-1.json"]
    for path in gone:
        path.unlink()
    again = tightlip.reproduce_adaptive(
        [files / "mine.parquet"], public_corpus=files / "open.parquet", out=made.folder
    )
    assert again.result == made.result
    rewritten = {path for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert {path.name for path in rewritten} - {LIST} <= {"clip-1.json", *(f"adaptive.{e}" for e in ("json", "csv", "html"))}  # fmt: skip


def test_another_experiment_in_the_same_folder_is_refused(made, files):
    with pytest.raises(UsageError, match="another unit"):
        tightlip.reproduce_adaptive(
            [files / "mine.parquet"],
            public_corpus=files / "open.parquet",
            out=made.folder,
            unit="example",
        )


def test_what_cannot_work_is_refused_before_anything_is_written(files, tmp_path):
    mine = files / "mine.parquet"
    for settings, words in (
        ({"corpus": [mine]}, "public_corpus=FILE"),
        ({"corpus": [mine, mine], "public_corpus": mine}, "one name"),
        ({"scale": "huge"}, "smoke"),
        ({"unit": "both"}, "auto, user, example"),
        ({"public_model": tmp_path / "nowhere"}, "does not exist"),
    ):
        with pytest.raises(UsageError, match=words):
            tightlip.reproduce_adaptive(out=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


# Its parts


@pytest.mark.parametrize("scale", list(reproduce.SCALES.values()), ids=list(reproduce.SCALES))
def test_every_scale_is_a_recipe_that_training_accepts(scale):
    assert scale.repetitions == (10, 100, 1000)
    TrainConfig.of(**scale.shape, **scale.plain)
    TrainConfig.of(**scale.public)
    for mode in ("clip", "scale", "as-published"):
        TrainConfig.of(
            **scale.shape,
            **scale.private,
            mitigation="adaptive-dp",
            adaptive=mode,
            noise_multiplier=1.0,
        )


def test_texts_without_users_are_each_somebodys(files, tmp_path):
    source = source_of(files / "mine.parquet", public=False)
    rows = pq.read_table(copied(source, tmp_path / "all.parquet", None)).to_pylist()
    assert len(rows) == 160  # the empty one is left out
    assert len({row["user"] for row in rows}) == len({row["text"] for row in rows})


def test_whether_a_text_is_kept_is_its_own_affair(files, tmp_path):
    """Half of them without the first is the same half, as far as they go."""
    texts = pq.read_table(files / "mine.parquet")["text"].to_pylist()[1:]
    kept = []
    for place, number in ((0, 80), (1, 79.5)):
        path = tmp_path / f"{place}.parquet"
        pq.write_table(pa.table({"text": texts[place:]}), path)
        rows = pq.read_table(
            copied(source_of(path, public=False), tmp_path / f"{place}-kept.parquet", number)
        )
        kept.append({text for text in rows["text"].to_pylist() if text != texts[0]})
    assert kept[0] == kept[1]
    assert 50 < len(kept[0]) < 110


def test_the_bundled_speakers_are_public_or_private_never_both():
    sides = [source_of(None, public=public) for public in (False, True)]
    users = [{user for batch in side.batches() for user in batch.users} for side in sides]
    assert not users[0] & users[1]
    assert len(users[0] | users[1]) == 299


def test_users_are_the_unit_where_there_are_enough_of_them():
    assert [chosen_unit("auto", number) for number in (None, 110, 1000)] == [
        "example",
        "example",
        "user",
    ]
    assert chosen_unit("user", 5) == "user"
    with pytest.raises(UsageError, match="unit='example'"):
        chosen_unit("user", None)


def test_carriers_are_short_and_of_every_third(tmp_path):
    path = tmp_path / "public.parquet"
    letters = "abcdefghij"
    texts = [f"{one} {other} word word word word" for one in letters for other in letters[:9]]
    unfit = ["too short", "so {braced} that it is no template", "with the number 7 in a text"]
    pq.write_table(pa.table({"text": [*texts, *unfit]}), path)
    nats = np.append(np.random.default_rng(0).random(90) + 0.1, [0.5] * 3)
    found = [text.removesuffix(" {words:2}") for text in carriers(path, nats, 9)]
    ranks = np.argsort(np.argsort(nats[:90]))[[texts.index(text) for text in found]]
    assert [int(rank) // 30 for rank in ranks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(UsageError, match="7 to 9 words"):
        carriers(path, nats, 9, (7, 9))


def test_carriers_need_short_documents(tmp_path):
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"text": ["word " * 30] * 5}), path)
    with pytest.raises(UsageError, match="larger public corpus"):
        carriers(path, np.ones(5), 3)


def test_thirds_follow_the_weights_and_leave_out_what_has_no_tokens():
    rho = np.random.default_rng(0).random(300)
    counted = np.arange(300) % 10 != 0
    found = thirds(rho, counted)
    assert (found[~counted] == -1).all()
    assert [int((found == place).sum()) for place in range(3)] == [90, 90, 90]
    assert rho[found == 0].max() < rho[found == 1].min() < rho[found == 2].min()


def test_no_tokens_have_no_loss(made, tmp_path):
    held = open_prepared(made.folder / "mine" / "corpus").validation
    model = made.folder / "mine" / "runs" / "none" / "model"
    scores = scores_by(model, held, tmp_path)
    assert nats_per_token(scores, np.zeros(held.num_documents, bool)) is None


def test_a_page_can_be_drawn_where_a_third_is_empty(made):
    result = json.loads(json.dumps(made.result))
    for row in result["corpora"][0]["rows"]:
        row["thirds"][1] |= dict.fromkeys(("loss_nats", "cost_nats", "kept_nats", "mean_rho"))
    assert "not known" in render_page("adaptive-paper", result=result)
