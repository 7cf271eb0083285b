"""Weighing a prepared corpus: against one model call per token, and against meddling."""

import json
import logging
import math
import random
import shutil

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tightlip
from animals import WORDS
from tightlip.core.errors import UsageError
from tightlip.corpus.prepare import corpus_id
from tightlip.corpus.privacy_weights import GRID_NATS, INFO_KEYS, on_grid, read_weights
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tables import TableWriter
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.scan import models as opened_models
from tightlip.scan.store import ScanStore
from tightlip.training import weighing as weight_scores

WINDOW = 8


def documents(num, *, seed, longest=25):
    """Mostly longer than the window; the first is empty."""
    draw = random.Random(seed)
    lengths = [0, 1, *(draw.randint(2, longest) for _ in range(num - 2))]
    return [
        {"user": f"u{n % 4}", "text": " ".join(draw.choices(WORDS, k=length))}
        for n, length in enumerate(lengths)
    ]


def save_model(folder, kind):
    tokenizer = build_tokenizer(open_corpus([("x", " ".join(WORDS))]))
    torch.manual_seed(1)
    size = len(tokenizer)
    if kind == "lstm":
        model = LSTMForCausalLM(LSTMConfig(size, 6, 10, 2))
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=WINDOW)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that it prefers some words to others
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: (folder / kind, *save_model(folder / kind, kind)) for kind in ("gpt2", "lstm")}


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    path = tmp_path_factory.mktemp("public") / "public.parquet"
    with TableWriter(path, {}) as table:
        for batch in open_corpus(documents(60, seed=9)).batches():
            table.write(batch)
    return path


def prepared(folder, rows=None, **settings):
    rows = rows or documents(40, seed=3)
    return tightlip.prepare(rows, folder, split="none", **settings)


def by_one_call_per_token(model, tokenizer, text, window):
    """Oracle: each token from a fresh call on what the model may see of the text before it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    inputs, stride = [tokenizer.bos_token_id, *ids], (window or 0) // 2 + 1
    nats = []
    for place, target in enumerate(ids):
        start = 0
        if window and place >= window:
            start = (1 + (place - window) // stride) * stride
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([inputs[start : place + 1]])).logits[0, -1]
        nats.append(-float(logits.double().log_softmax(-1)[target]))
    return sum(nats) / len(nats) if nats else math.nan


@pytest.mark.parametrize(("kind", "window"), [("gpt2", WINDOW), ("lstm", None)])
def test_weights_are_those_of_each_document_scored_by_itself(
    tmp_path, models, public, kind, window
):
    folder, model, tokenizer = models[kind]
    corpus = prepared(tmp_path / "p")
    found = tightlip.weigh(corpus, public_model=folder, public_corpus=public)
    naive, naive_public = (
        np.array([by_one_call_per_token(model, tokenizer, r["text"], window) for r in rows])
        for rows in (documents(40, seed=3), documents(60, seed=9))
    )
    np.testing.assert_allclose(
        found.log_perplexities, naive, rtol=0, atol=GRID_NATS / 2 + 1e-5, equal_nan=True
    )
    a, b = np.quantile(on_grid(naive_public[1:]), (0.05, 0.95))
    assert (found.info["a"], found.info["b"]) == pytest.approx((a, b), abs=GRID_NATS)
    expected = np.clip((on_grid(naive) - a) / (b - a), 0.05, 1)
    expected[np.isnan(naive)] = 1
    assert found.rho == pytest.approx(expected, abs=3 * GRID_NATS / (b - a))
    stored = read_weights(corpus.folder)
    assert stored.rho.tolist() == found.rho.tolist()
    assert list(stored.info) == list(found.info)
    assert set(stored.info) == {*INFO_KEYS, "model_files"}
    assert stored.info["is_sound"]
    assert stored.info["estimator"] == "language model"


def with_one_changed(rows, place):
    other = rows[place] | {"text": " ".join(WORDS[::-1] * 4)}  # longer than any: other batches
    return [*rows[:place], other, *rows[place + 1 :]]


def weighed(folder, rows, model, public, **settings):
    corpus = prepared(folder, rows, tokenizer=str(model))
    return tightlip.weigh(corpus, public_model=model, public_corpus=public, **settings)


@pytest.mark.parametrize("kind", ["gpt2", "lstm"])
def test_changing_one_document_changes_no_other_weight(tmp_path, models, public, kind):
    rows, model = documents(40, seed=3), models[kind][0]
    before = {
        weights: weighed(tmp_path / "p", rows, model, public, weights=weights).rho
        for weights in ("public", "public-rank")
    }
    for place in (1, 7, 30):
        changed = with_one_changed(rows, place)
        for weights, rho in before.items():
            found = weighed(tmp_path / f"{place}", changed, model, public, weights=weights).rho
            assert np.delete(found, place).tolist() == np.delete(rho, place).tolist()


@pytest.mark.parametrize("kind", ["gpt2", "lstm"])
def test_one_document_more_or_less_changes_no_other_weight(tmp_path, models, public, kind):
    """Neighbours as the proof has them: everybody else stands in other places and other batches."""
    rows, model = documents(40, seed=3), models[kind][0]
    newcomer = {"user": "u9", "text": " ".join(WORDS[::-1] * 4)}
    for weights in ("public", "public-rank"):
        before = weighed(tmp_path / "p", rows, model, public, weights=weights).rho.tolist()
        for place in (0, 7, 40):
            more = [*rows[:place], newcomer, *rows[place:]]
            found = weighed(tmp_path / f"more-{place}", more, model, public, weights=weights).rho
            assert np.delete(found, place).tolist() == before
        for place in (1, 30, 39):
            less = rows[:place] + rows[place + 1 :]
            found = weighed(tmp_path / f"less-{place}", less, model, public, weights=weights).rho
            assert found.tolist() == before[:place] + before[place + 1 :]


@pytest.mark.parametrize("weights", ["minmax", "rank"])
def test_over_the_corpus_itself_it_changes_others(tmp_path, models, public, weights):
    rows, model = documents(40, seed=3), models["gpt2"][0]
    before = weighed(tmp_path / "a", rows, model, None, weights=weights)
    place = int(np.nanargmax(before.log_perplexities))
    changed = with_one_changed(rows, place)
    found = weighed(tmp_path / "b", changed, model, public, weights=weights)
    assert (np.delete(found.rho, place) != np.delete(before.rho, place)).any()
    assert not found.info["is_sound"]
    assert found.info["public_corpus"] is None, "nothing was taken from it"


PLAIN_SCAN = ScanStore.scan


def noisy(size):
    """A batched scan whose every value is off by up to `size`, as in other company it might be."""

    def scanning(self, corpus, *, open_scan, **others):
        draw = np.random.default_rng(0)

        def off(tokens, bounds):
            ranks, log_probs = open_scan()(tokens, bounds)
            shift = draw.uniform(-size, size, len(bounds) - 1)
            return ranks, log_probs + np.repeat(shift, np.diff(bounds)).astype(np.float32)

        return PLAIN_SCAN(self, corpus, open_scan=lambda: off, **others)

    return scanning


def assert_company_reaches_no_weight(tmp_path, rows, model, plain, monkeypatch):
    """Rounding changes nothing; what is more than rounding is refused."""
    monkeypatch.setattr(ScanStore, "scan", noisy(1.9e-4))
    found = weighed(tmp_path / "b", rows, model, None, weights="rank")
    np.testing.assert_array_equal(found.log_perplexities, plain.log_perplexities)
    monkeypatch.setattr(ScanStore, "scan", noisy(5e-3))
    with pytest.raises(UsageError, match="in company than alone"):
        weighed(tmp_path / "c", rows, model, None, weights="rank")


def test_what_a_batch_does_to_rounding_reaches_no_weight(tmp_path, models, monkeypatch):
    rows, model = documents(400, seed=3), models["gpt2"][0]
    plain = weighed(tmp_path / "a", rows, model, None, weights="rank")
    assert_company_reaches_no_weight(tmp_path, rows, model, plain, monkeypatch)


def test_company_is_noticed_in_a_corpus_of_a_few_documents_none_near_an_edge(
    tmp_path, models, monkeypatch
):
    rows, model = documents(8, seed=3), models["gpt2"][0]
    plain = weighed(tmp_path / "a", rows, model, None, weights="rank")
    monkeypatch.setattr(
        weight_scores, "near_an_edge", lambda nats, tolerance: np.zeros(len(nats), bool)
    )
    assert_company_reaches_no_weight(tmp_path, rows, model, plain, monkeypatch)


def test_a_model_whose_rows_influence_each_other_is_refused_on_a_tiny_corpus(
    tmp_path, models, monkeypatch
):
    def mingling(path, **options):
        model = GPT2LMHeadModel.from_pretrained(path).eval()
        model.transformer.wte.register_forward_hook(
            lambda module, given, output: output + 0.5 * output.mean(0, keepdim=True)
        )
        return model

    rows, folder = documents(6, seed=4), models["gpt2"][0]
    weighed(tmp_path / "a", rows, folder, None, weights="rank")
    monkeypatch.setattr(opened_models, "load_causal_lm", mingling)
    with pytest.raises(UsageError, match="in company than alone"):
        weighed(tmp_path / "b", rows, folder, None, weights="rank")


def test_words_of_a_public_corpus_do_where_no_model_is_given(tmp_path, public):
    rows = [*documents(40, seed=3), {"user": "u9", "text": "zzyzx qwrt vbnm"}]
    corpus = prepared(tmp_path / "p", rows)
    found = tightlip.weigh(corpus, public_corpus=public)
    assert found.info["estimator"] == "frequency estimate"
    assert found.info["model"] == "frequency estimate, no language model"
    assert found.info["model_fingerprint"] is None
    assert found.rho[-1] == 1
    assert found.log_perplexities[-1] == np.nanmax(found.log_perplexities)
    page = (corpus.folder / "weights/weights.html").read_text()
    assert "frequency estimate, no language model" in page


# What is there already


def contents(folder):
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_weights_are_added_and_replaced_and_the_rest_stays(tmp_path, models, public, monkeypatch):
    corpus = prepared(tmp_path / "p")
    before = contents(corpus.folder)
    settings = {"public_model": models["gpt2"][0], "public_corpus": public}
    first = tightlip.weigh(corpus, **settings)
    after = contents(corpus.folder)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"weights", "scan"}

    tightlip.weigh(corpus.folder, **settings)
    assert contents(corpus.folder) == after, "the same settings change nothing"

    def never(*_, **__):
        raise AssertionError("scored again")

    monkeypatch.setattr(ScanStore, "scan", never)
    second = tightlip.weigh(corpus, **settings, weights="public-rank", least_weight=0.2)
    assert second.info["a"] is None
    assert second.rho.min() >= 0.2
    assert second.log_perplexities.tolist()[1:] == first.log_perplexities.tolist()[1:]
    again = tightlip.weigh(corpus, **settings)
    assert again.rho.tolist() == first.rho.tolist()
    with pytest.raises(AssertionError, match="scored again"):
        tightlip.weigh(corpus, **(settings | {"public_model": models["lstm"][0]}))


# What is refused


def test_the_corpus_itself_is_no_public_corpus(tmp_path, models):
    rows, model = documents(40, seed=3), models["gpt2"][0]
    source = tmp_path / "private.parquet"
    with TableWriter(source, {}) as table:
        for batch in open_corpus(rows).batches():
            table.write(batch)
    corpus = tightlip.prepare(source, tmp_path / "p")
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(source.read_bytes())
    held_out = tmp_path / "held-out.parquet"  # its own metadata says what it was cut from
    held_out.write_bytes((corpus.folder / "validation.parquet").read_bytes())
    for public in (source, corpus.folder, corpus.folder / "validation.parquet", held_out):
        with pytest.raises(UsageError, match="the corpus itself or a part of it"):
            tightlip.weigh(corpus, public_model=model, public_corpus=public)
    with pytest.raises(UsageError, match=r"stand in .* too"):
        tightlip.weigh(corpus, public_model=model, public_corpus=copy)
    assert not (corpus.folder / "weights").exists()


def test_a_model_trained_on_this_corpus_is_not_public(tmp_path, public):
    corpus = prepared(tmp_path / "p")
    small = {"embedding_size": 4, "hidden_size": 4, "steps": 1}
    run = tightlip.train(corpus.folder, tmp_path / "run", **small)
    for model in (run.folder, run.model_folder):
        with pytest.raises(UsageError, match="trained on this very corpus"):
            tightlip.weigh(corpus, public_model=model, public_corpus=public)
    # Other files with the same text have another fingerprint.
    other = prepared(tmp_path / "other", documents(40, seed=3)[:-1])
    with pytest.raises(UsageError, match="which shaped public_model"):
        tightlip.weigh(other, public_model=run.folder, public_corpus=public)
    stranger = prepared(tmp_path / "stranger", documents(40, seed=77))
    tightlip.weigh(stranger, public_model=run.folder, public_corpus=public)


SMALL = {"embedding_size": 4, "hidden_size": 4, "num_layers": 1, "steps": 1, "snapshot": "none"}
GOES_ON = {"steps": 1, "snapshot": "none"}


def refused(corpus, model, public, words):
    with pytest.raises(UsageError, match=words):
        tightlip.weigh(corpus, public_model=model, public_corpus=public)
    assert not (corpus.folder / "weights").exists()


def test_a_model_that_learnt_the_text_through_a_chain_is_not_public_nor_is_its_copy(
    tmp_path, models, public
):
    """It was trained on this text, went on with other text, and was carried elsewhere."""
    words = {"tokenizer": str(models["lstm"][0])}
    corpus = prepared(tmp_path / "p", **words)
    leak = tightlip.train(corpus.folder, tmp_path / "leak", **SMALL)
    other = prepared(tmp_path / "other", documents(40, seed=55), **words)
    chain = tightlip.train(
        other.folder, tmp_path / "chain", model=str(leak.model_folder), **GOES_ON
    )
    refused(corpus, chain.model_folder, public, "through the model that it went on from")
    copy = shutil.copytree(chain.model_folder, tmp_path / "copy")
    again = tightlip.train(other.folder, tmp_path / "again", model=str(copy), **GOES_ON)
    for folder in ("leak", "chain"):
        shutil.rmtree(tmp_path / folder)
    refused(corpus, copy, public, "trained on this very corpus")
    refused(corpus, again.folder, public, "trained on this very corpus")
    # Another preparation of the same text is the same people's.
    cut = prepared(tmp_path / "cut", **words, min_users=None)
    refused(cut, copy, public, "another part of the same text")
    stranger = prepared(tmp_path / "stranger", documents(40, seed=77), **words)
    assert tightlip.weigh(stranger, public_model=copy, public_corpus=public).info["is_sound"]


def test_a_private_run_names_its_corpus_and_tells_no_fingerprint_of_it(tmp_path, models, public):
    corpus = prepared(tmp_path / "p", tokenizer=str(models["lstm"][0]))
    own = {"mitigation": "dp", "noise_multiplier": 1.0, "batch_size": 2, "unit": "user"}
    run = tightlip.train(corpus.folder, tmp_path / "run", **SMALL, **own)
    record = json.loads((run.model_folder / "guarantee.json").read_text())
    source = json.loads((corpus.folder / "prepared.json").read_text())["source_fingerprint"]
    assert corpus_id(corpus.folder) in record["learnt_from"]["learnt"]
    assert record["learnt_from"]["openly"] == []
    for file in run.folder.rglob("*"):
        if file.is_file() and file.name != "config.toml":
            assert source.encode() not in file.read_bytes()
    copy = shutil.copytree(run.model_folder, tmp_path / "copy")
    shutil.rmtree(run.folder)
    other = prepared(tmp_path / "o", documents(40, seed=55), tokenizer=str(models["lstm"][0]))
    chain = tightlip.train(other.folder, tmp_path / "chain", model=str(copy), **GOES_ON)
    refused(corpus, chain.model_folder, public, "trained on this very corpus")


def test_a_vocabulary_that_was_learnt_from_the_text_is_not_public(tmp_path, public):
    rows = documents(40, seed=3)
    corpus = prepared(tmp_path / "p", rows)
    words = {"tokenizer": str(corpus.tokenizer_folder)}
    other = prepared(tmp_path / "other", documents(40, seed=55), **words)
    run = tightlip.train(other.folder, tmp_path / "run", **SMALL)
    copy = shutil.copytree(run.model_folder, tmp_path / "copy")
    handed_on = prepared(tmp_path / "on", documents(40, seed=66), tokenizer=str(copy))
    second = tightlip.train(handed_on.folder, tmp_path / "second", **SMALL)
    for model in (run.folder, copy, second.folder):
        refused(corpus, model, public, "vocabulary of public_model=.* learnt from this very corpus")


def test_a_noisy_vocabulary_is_paid_for_where_the_corpus_uses_it_itself(tmp_path, public):
    rows = [row | {"user": f"u{n}"} for n, row in enumerate(documents(200, seed=3))]
    corpus = prepared(tmp_path / "p", rows, vocabulary_noise=1.0, vocabulary_words_per_user=20)
    other = prepared(
        tmp_path / "other", documents(40, seed=55), tokenizer=str(corpus.tokenizer_folder)
    )
    run = tightlip.train(other.folder, tmp_path / "run", **SMALL)
    assert tightlip.weigh(corpus, public_model=run.folder, public_corpus=public).info["is_sound"]
    without = prepared(tmp_path / "q", rows)
    refused(without, run.folder, public, "vocabulary of public_model")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_model_of_a_part_of_the_text_is_not_public_held_out_or_not(tmp_path, models, public):
    """The share counts from both sides: ten documents are a quarter here and all of it there."""
    rows, words = documents(80, seed=3), {"tokenizer": str(models["lstm"][0])}
    corpus = tightlip.prepare(rows, tmp_path / "p", split="text", holdout=0.3, **words)
    held = next(open_corpus(corpus.folder / "validation.parquet").batches()).texts
    parts = {
        "part": rows[2:12],
        "held-out": [{"user": "v", "text": text} for text in held],
        "lines": [
            {"user": "v", "text": " ".join(row["text"].split()[start : start + 9])}
            for row in rows
            for start in (0, 9)
        ],
    }
    for name, part in parts.items():
        source = write_rows(tmp_path / f"{name}.jsonl", part)
        made = tightlip.prepare(source, tmp_path / f"{name}-prepared", split="none", **words)
        run = tightlip.train(made.folder, tmp_path / f"{name}-run", **SMALL)
        refused(corpus, run.folder, public, "which shaped public_model=.*, so it saw them")


def test_a_public_corpus_that_holds_the_text_cut_up_or_changed_is_none(tmp_path, models):
    rows, other = documents(80, seed=3), documents(400, seed=21)
    corpus = prepared(tmp_path / "p", rows)
    for name, found in {
        "half": [*rows, *documents(80, seed=22)],
        "a twentieth": [*rows[:20], *other],
        "lines": [
            {"text": " ".join(row["text"].split()[start : start + 9])}
            for row in rows
            for start in (0, 9)
        ],
        "dotted": [{"text": row["text"] + " ."} for row in rows],
    }.items():
        public = write_rows(tmp_path / f"{name}.jsonl", found)
        refused(corpus, models["gpt2"][0], public, "stand in .* too.*not public")


def test_a_few_shared_texts_are_let_pass_and_recorded(tmp_path, models, caplog):
    rows = documents(80, seed=3)
    long = [row for row in rows if len(row["text"].split()) >= 8][:2]
    public = write_rows(tmp_path / "public.jsonl", [*documents(300, seed=21), *long])
    corpus = prepared(tmp_path / "p", rows)
    with caplog.at_level(logging.WARNING, "tightlip"):
        found = tightlip.weigh(corpus, public_model=models["gpt2"][0], public_corpus=public)
    assert "Take them out of one of the two" in caplog.text
    shared = read_weights(corpus.folder).info["shared"]["public_corpus"]
    assert shared == found.info["shared"]["public_corpus"]
    assert (shared["here"]["copied"], shared["there"]["copied"]) == (2, 2)


def test_canaries_planted_after_public_text_are_nobodys_private_text(tmp_path, models, public):
    source = write_rows(tmp_path / "own.jsonl", documents(60, seed=3))
    carrier = next(row["text"] for row in documents(60, seed=9) if len(row["text"].split()) > 12)
    tightlip.plant_canaries(
        source, tmp_path / "planted", templates=[carrier + " {digits:4}"], repetitions=[10]
    )
    corpus = tightlip.prepare(tmp_path / "planted/corpus.parquet", tmp_path / "p", split="none")
    found = tightlip.weigh(corpus, public_model=models["gpt2"][0], public_corpus=public)
    assert found.info["shared"]["public_corpus"]["here"]["copied"] == 0


def test_a_private_runs_model_is_known_by_the_name_of_its_corpus(tmp_path, models, public):
    corpus, stranger = prepared(tmp_path / "p"), prepared(tmp_path / "q", documents(40, seed=77))
    moved = shutil.copytree(models["lstm"][0], tmp_path / "moved")
    card = {"corpus_fingerprint": corpus_id(corpus.folder)}
    (moved / "guarantee.json").write_text(json.dumps(card), encoding="utf-8")
    with pytest.raises(UsageError, match="trained on this very corpus"):
        tightlip.weigh(corpus, public_model=moved, public_corpus=public)
    tightlip.weigh(stranger, public_model=moved, public_corpus=public)


def test_an_unusable_model_is_refused(tmp_path, models, public):
    corpus = prepared(tmp_path / "p")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError):
        tightlip.weigh(corpus, public_model=empty, public_corpus=public)
    broken = tmp_path / "broken"
    model, _ = save_model(broken, "gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[3, 3] = math.nan
    model.save_pretrained(broken)
    with pytest.raises(UsageError, match="NaN"):
        tightlip.weigh(corpus, public_model=broken, public_corpus=public)
    assert not (corpus.folder / "weights").exists()


def test_what_makes_weights_doubtful_is_said(tmp_path, models, caplog):
    rows = [*documents(40, seed=3), {"user": "u9", "text": "zzyzx " * 40}]
    few = tmp_path / "few.jsonl"
    few.write_text('{"text": "ant bee cat"}\n{"text": "dog eel fox gnu"}\n', encoding="utf-8")
    corpus = prepared(tmp_path / "p", rows)
    with caplog.at_level(logging.WARNING, "tightlip"):
        tightlip.weigh(corpus, public_model=models["gpt2"][0], public_corpus=few)
    assert "Only 2 public documents" in caplog.text
    assert "unknown words" in caplog.text
