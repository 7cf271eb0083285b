"""Real canaries against reading every document by hand, and whom they may not be measured on."""

import json
import math
import os
import random
import shutil
import stat

import pytest

import tightlip
from models.small_models import next_logits
from tightlip.audit.canaries.real import usable_documents
from tightlip.core.checksums import unsealed
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import open_run
from tightlip.corpus.canaries import CanaryConfig, read_canary_key
from tightlip.corpus.canaries import plant_in as plant_canaries
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.readers import open_corpus
from tightlip.models.loading import load_causal_lm, load_tokenizer

pytestmark = pytest.mark.slow

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]
SMALL = {"embedding_size": 6, "hidden_size": 8, "num_layers": 1, "steps": 3, "sequence_length": 16}
# Nobody shares "solo", so that it falls out of a vocabulary of shared words.
PREPARE = {"split": "none", "min_users": 2}


def documents():
    draw = random.Random(0)
    rows = [
        (f"u{number % 5}", " ".join(draw.choices(WORDS, k=draw.randint(2, 9))))
        for number in range(60)
    ]
    rows.insert(3, ("u1", ""))
    rows += [("short", "ant bee"), ("rare", "ant bee cat dog solo eel"), ("u0", "ant " * 9)]
    twice = "hen hen gnu gnu fox fox eel eel"
    return [*rows, ("twin", twice), ("other twin", twice), ("other twin", "ant")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in (
        ("plain", {"seed": 1}),
        ("again", {"seed": 2, "snapshot_steps": 2}),
        ("quiet", {"mitigation": "adversarial", "discriminator_size": 4}),
    ):
        tightlip.train(documents(), folder / name, prepare=PREPARE, **SMALL, **settings)
    tightlip.choose_canaries(folder / "plain", folder / "real.json", device="cpu")
    return folder


def perplexity_by_rereading(model, bos, ids):
    nats = 0.0
    for end in range(len(ids)):
        logits = next_logits(model, [bos, *ids[:end]]).double()
        nats -= float(logits.log_softmax(-1)[ids[end]])
    return math.exp(nats / len(ids))


def test_each_users_canary_is_their_most_surprising_usable_document(place):
    run = open_run(place / "plain")
    model, tokenizer = load_causal_lm(run.model_folder), load_tokenizer(run.model_folder)
    best = {}
    for user, text in documents():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 5 or tokenizer.unk_token_id in ids:
            continue
        found = perplexity_by_rereading(model, tokenizer.bos_token_id, ids)
        if found > best.get(user, (0.0, ""))[0]:
            best[user] = (found, text)
    key = read_canary_key(place / "real.json")
    assert {one.user: one.text for one in key.canaries} == {
        u: text for u, (_, text) in best.items()
    }
    assert "short" not in best
    assert "rare" not in best
    assert key.num_users_left_out == 2
    assert {one.repetitions for one in key.canaries if "twin" in one.user} == {2}
    assert {one.kind for one in key.canaries} == {"real"}


def test_the_key_is_the_owners_and_has_the_shape_of_what_is_planted(place):
    assert stat.S_IMODE(os.stat(place / "real.json").st_mode) == 0o600
    there = json.loads((place / "real.json").read_text())
    assert there["pools"] == {}
    planted = {"text", "user", "repetitions", "template", "values", "kind"}
    assert all(set(one) == planted for one in there["canaries"])
    assert all(one["template"] is None and one["values"] == [] for one in there["canaries"])


def test_real_and_planted_are_measured_together(place, tmp_path):
    config = CanaryConfig(
        templates=["{words:2} {digits:2}"], repetitions=[1, 1], words=["ant", "bee", "cat"]
    )
    plant_canaries(open_corpus(documents()), tmp_path / "p", config)
    keys = [tmp_path / "p/key.json", place / "real.json"]
    found = tightlip.measure_canaries(place / "again", keys, device="cpu")
    kinds = [one["kind"] for one in found]
    assert kinds == ["planted"] * 2 + ["real"] * 7
    assert all(one["exposure_bits"] is not None and one["exact"] for one in found[:2])
    assert all(one["exposure_bits"] is None and one["perplexity"] > 1 for one in found[2:])
    twice = [keys[1], str(keys[1])]
    assert tightlip.measure_canaries(place / "again", twice, device="cpu") == found[2:]


def test_what_was_planted_is_never_chosen(place, tmp_path):
    rows = [(f"u{number % 2}", " ".join(WORDS[:6])) for number in range(8)]
    config = CanaryConfig(templates=["{words:6}"], repetitions=[1], per_user=True, words=WORDS)
    planted = plant_canaries(open_corpus(rows), tmp_path / "p", config)
    corpus = tmp_path / "p/corpus.parquet"
    tightlip.train(corpus, tmp_path / "run", prepare={"split": "none"}, **SMALL | {"steps": 60})
    for name, key in (("with", ()), ("without", tmp_path / "p/key.json")):
        found = tightlip.choose_canaries(
            tmp_path / "run", tmp_path / name, key=key, device="cpu"
        ).canaries
        made_up = {one.text for one in planted.canaries}
        assert {one.text for one in found} == (made_up if name == "with" else {rows[0][1]})
    assert {one.repetitions for one in found} == {8}


def test_the_run_that_chose_is_not_measured_by_its_own_choice(place, tmp_path):
    run = open_run(place / "plain")
    moved = shutil.copytree(run.model_folder, tmp_path / "moved")
    for model in (place / "plain", run.model_folder, moved, run.snapshots[0].folder):
        with pytest.raises(UsageError, match=r"flatters it. Choose with .* another seed"):
            tightlip.measure_canaries(model, place / "real.json", device="cpu")


@pytest.mark.parametrize(
    ("run", "settings", "says"),
    [
        ("quiet", {}, "trained with mitigation 'adversarial'"),
        ("plain/model", {}, "is not a tightlip run"),
        ("plain", {"min_tokens": 1}, "min_tokens=1 is out of range. It must be at least 2"),
        ("plain", {"min_tokens": 99}, "No document has min_tokens=99 tokens"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(place, tmp_path, run, settings, says):
    with pytest.raises(UsageError, match=says):
        tightlip.choose_canaries(place / run, tmp_path / "k.json", device="cpu", **settings)
    assert not (tmp_path / "k.json").exists()
    with pytest.raises(UsageError, match=r"exists. Give another out"):
        tightlip.choose_canaries(place / "plain", place / "real.json", device="cpu")


def test_a_real_key_without_its_chooser_is_refused(place, tmp_path):
    there = json.loads((place / "real.json").read_text())
    (tmp_path / "k.json").write_text(json.dumps(unsealed(there)[0] | {"model_fingerprint": None}))
    with pytest.raises(UsageError, match="neither planted nor chosen by a known model"):
        read_canary_key(tmp_path / "k.json")


def test_documents_of_no_tokens_and_their_neighbours_are_told_apart(place):
    tokens = open_prepared(place / "plain/corpus").train
    usable = usable_documents(tokens, int(tokens.document(4)[0]), 1)
    for number in range(tokens.num_documents):
        ids = tokens.document(number)
        assert usable[number] == (len(ids) > 0 and tokens.document(4)[0] not in ids)
