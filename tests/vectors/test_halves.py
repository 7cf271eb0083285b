"""Two halves on disk: each loads alone, and what is damaged or foreign is refused."""

import json
import shutil
import stat

import numpy as np
import pytest
import torch

from by_hand import unlisted
from tightlip.core.errors import UsageError
from tightlip.vectors.extractors import make_extractor
from tightlip.vectors.halves import (
    Classifier,
    load_classifier,
    load_extractor,
    pair_id,
    write_device,
    write_server,
)
from vectors.tiny_halves import LABELS, TEXTS, write_halves
from vectors.toy_corpora import tiny_encoder


@pytest.mark.parametrize("kind", ["bag", "lstm", "bert", "roberta"])
def test_the_device_half_loads_with_the_servers_folder_deleted(kind, tmp_path):
    torch.manual_seed(0)
    spec = tiny_encoder(tmp_path / "given", kind) if "bert" in kind else kind
    extractor = make_extractor(spec, TEXTS).eval()
    wanted = extractor.encode(TEXTS)
    write_device(tmp_path / "run" / "device", extractor, {}, "ab")
    write_server(tmp_path / "run" / "server", Classifier(extractor.dimensions, LABELS), "ab")
    shutil.rmtree(tmp_path / "run" / "server")
    shutil.rmtree(tmp_path / "given", ignore_errors=True)
    moved = shutil.move(tmp_path / "run" / "device", tmp_path / "elsewhere")
    assert np.array_equal(load_extractor(moved).encode(TEXTS), wanted)


def test_the_server_half_gives_the_same_logits_again_without_the_device(tmp_path):
    torch.manual_seed(0)
    for hidden in (0, 5):
        classifier = Classifier(4, LABELS, hidden=hidden, center=0.5, width=3.0).eval()
        write_server(tmp_path / "server", classifier, "ab")
        again, vectors = load_classifier(tmp_path / "server"), torch.randn(3, 4)
        assert again.labels == LABELS
        assert torch.equal(again(vectors), classifier(vectors))


def test_every_file_is_its_owners_alone(tmp_path):
    write_halves(tmp_path)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {0o600, 0o700}


def test_another_weight_or_another_guarantee_is_another_pair():
    torch.manual_seed(0)
    extractor, classifier = make_extractor("bag", TEXTS, dimensions=4), Classifier(4, LABELS)
    pair = pair_id(extractor, classifier, {"epsilon": 1.0})
    assert pair == pair_id(extractor, classifier, {"epsilon": 1.0})
    assert pair != pair_id(extractor, classifier, {"epsilon": 2.0})
    with torch.no_grad():
        classifier.layers[-1].bias += 1
    assert pair != pair_id(extractor, classifier, {"epsilon": 1.0})


@pytest.mark.parametrize("kind", ["device", "server"])
def test_a_folder_that_is_no_half_is_refused(kind, tmp_path):
    load = {"device": load_extractor, "server": load_classifier}[kind]
    with pytest.raises(UsageError, match="represent train"):
        load(tmp_path)
    write_halves(tmp_path)
    with pytest.raises(UsageError, match=rf"Give .*{kind}\."):
        load(tmp_path)  # the run, where its half belongs
    other = {"device": "server", "server": "device"}[kind]
    with pytest.raises(UsageError, match=f"no {kind}.json"):
        load(tmp_path / other)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"format": 2}, "has format 2"),
        ({"kind": "tightlip-server"}, "does not describe"),
        ({"dimensions": 7}, "two trainings"),
        ({"pair": None}, None),
    ],
)
def test_a_changed_description_is_refused(change, because, tmp_path):
    write_halves(tmp_path)
    path = tmp_path / "device" / "device.json"
    unlisted(path).write_text(json.dumps(json.loads(path.read_text()) | change))
    if because is None:
        load_extractor(tmp_path / "device")  # a pair is compared where two halves meet
        return
    with pytest.raises(UsageError, match=because):
        load_extractor(tmp_path / "device")


def test_a_damaged_server_is_refused(tmp_path):
    write_halves(tmp_path)
    weights = tmp_path / "server" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    with pytest.raises(UsageError, match="not what tightlip wrote"):
        load_classifier(tmp_path / "server")
    unlisted(weights)
    with pytest.raises(UsageError, match="Copy the folder again"):
        load_classifier(tmp_path / "server")
    path = tmp_path / "server" / "server.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(UsageError, match="is damaged"):
        load_classifier(tmp_path / "server")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_of_another_trainings_extractor_is_refused(name, tmp_path):
    for seed in (0, 1):
        write_halves(tmp_path / str(seed), seed=seed)
    theirs, ours = (tmp_path / seed / "device/extractor" / name for seed in "10")
    same = theirs.read_bytes() == ours.read_bytes()
    ours.write_bytes(theirs.read_bytes() + (b"\n" if same else b""))
    with pytest.raises(UsageError, match=name):
        load_extractor(tmp_path / "0" / "device")


def test_a_file_added_to_the_extractor_or_lost_from_it_is_refused(tmp_path):
    write_halves(tmp_path)
    folder = tmp_path / "device" / "extractor"
    (folder / ".DS_Store").write_bytes(b"of a file manager")
    load_extractor(tmp_path / "device")
    (folder / "added_tokens.json").write_text("{}")
    with pytest.raises(UsageError, match=r"added_tokens\.json"):
        load_extractor(tmp_path / "device")
    (folder / "added_tokens.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer_config\.json"):
        load_extractor(tmp_path / "device")
