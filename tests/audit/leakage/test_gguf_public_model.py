"""A GGUF file as the public model: what comes out is what the same weights in a folder give."""

import random

import pytest

import tightlip
from animals import WORDS
from models.tiny_gguf import write_gguf
from tightlip.core.errors import UsageError
from tightlip.models import load_tokenizer

pytestmark = pytest.mark.slow


def documents(num, *, seed):
    draw = random.Random(seed)
    return [
        {"user": f"u{n % 4}", "text": " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))}
        for n in range(num)
    ]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The file, and a folder with the same weights and tokenizer."""
    place = tmp_path_factory.mktemp("public")
    model = write_gguf(place / "tiny.gguf")
    model.save_pretrained(place / "folder")
    load_tokenizer(place / "tiny.gguf").save_pretrained(place / "folder")
    return place / "tiny.gguf", place / "folder"


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "public.csv"
    rows = "\n".join(f"{each['user']},{each['text']}" for each in documents(40, seed=9))
    path.write_text(f"user,text\n{rows}\n", encoding="utf-8")
    return path


def test_weights_are_those_of_the_same_model_in_a_folder(both, public, tmp_path):
    found = []
    for number, model in enumerate(both):
        corpus = tightlip.prepare(documents(30, seed=3), tmp_path / str(number), split="none")
        found.append(tightlip.weigh(corpus, public_model=model, public_corpus=public))
    by_file, by_folder = found
    assert by_file.log_perplexities.tolist() == by_folder.log_perplexities.tolist()
    assert by_file.rho.tolist() == by_folder.rho.tolist()
    assert by_file.info["model"] == "tiny.gguf"
    assert by_file.info["model_fingerprint"] != by_folder.info["model_fingerprint"]


def test_a_leakage_report_has_the_same_ratios(both, tmp_path):
    rows = documents(12, seed=5)
    run = tightlip.train(
        rows, tmp_path / "run", steps=60, batch_size=4, learning_rate=2e-2, snapshot="none"
    )
    found = [tightlip.audit(run.folder, public_model=model, top_k=3) for model in both]
    # Nothing stands before a document here, so what begins with its first token has no ratio.
    ratios = [report.sequences["ratio"].fill_null(0).to_pylist() for report in found]
    assert any(ratios[0])
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_a_file_that_is_not_there_is_refused(public, tmp_path):
    corpus = tightlip.prepare(documents(5, seed=1), tmp_path / "p", split="none")
    with pytest.raises(UsageError, match=r"nowhere\.gguf"):
        tightlip.weigh(corpus, public_model=tmp_path / "nowhere.gguf", public_corpus=public)
