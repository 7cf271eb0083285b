"""The exported extractor: ONNX Runtime's vectors are torch's, and no torch weight is needed."""

import shutil

import numpy as np
import onnx
import pytest
import torch

from tightlip.core.errors import UsageError
from tightlip.core.files import names_in
from tightlip.vectors.extractors import make_extractor
from tightlip.vectors.halves import OnnxExtractor, export_onnx, load_extractor, write_device
from vectors.tiny_halves import write_halves
from vectors.toy_corpora import FILLERS, tiny_encoder, toy_corpus

pytestmark = pytest.mark.slow

TEXTS = [row["text"] for row in toy_corpus(20)] + ["", "goal", " ".join(FILLERS * 5), "goal bank"]


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    """A device's half of each kind, exported."""
    folder, found = tmp_path_factory.mktemp("devices"), {}
    torch.manual_seed(0)
    for kind, pooling in (("lstm", "mean"), ("bert", "cls")):
        spec = kind if kind == "lstm" else tiny_encoder(folder / f"given-{kind}", kind)
        extractor = make_extractor(spec, TEXTS, pooling=pooling)
        write_device(folder / kind, extractor, {}, f"pair of {kind}")
        export_onnx(folder / kind)
        found[kind] = folder / kind
    return found


@pytest.mark.parametrize("kind", ["lstm", "bert"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_onnx_runtimes_vectors_are_torchs(devices, kind, batch_size):
    """However many texts, however long, also where they are longer than the window."""
    wanted = load_extractor(devices[kind]).encode(TEXTS)
    found = OnnxExtractor(devices[kind]).encode(TEXTS, batch_size=batch_size)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-5


def test_no_torch_weight_is_read(devices, tmp_path):
    alone = shutil.copytree(devices["lstm"], tmp_path / "device")
    wanted = load_extractor(alone).encode(TEXTS)
    (alone / "extractor" / "model.safetensors").unlink()
    assert np.abs(OnnxExtractor(alone).encode(TEXTS) - wanted).max() < 1e-5


def test_the_file_is_sound_stands_alone_and_is_its_owners(devices):
    path = devices["bert"] / "device.onnx"
    onnx.checker.check_model(str(path))
    model = onnx.load(str(path), load_external_data=False)
    assert all(weight.data_location == 0 for weight in model.graph.initializer)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [given.name for given in model.graph.input] == ["input_ids", "attention_mask"]
    assert [given.name for given in model.graph.output] == ["vector"]


def test_a_file_of_another_training_and_a_damaged_one_are_refused(devices, tmp_path):
    write_halves(tmp_path)
    device = tmp_path / "device"
    with pytest.raises(UsageError, match="represent export"):
        OnnxExtractor(device)
    shutil.copy(devices["lstm"] / "device.onnx", device)
    with pytest.raises(UsageError, match="another training"):
        OnnxExtractor(device)
    (device / "device.onnx").write_bytes(b"no model")
    with pytest.raises(UsageError, match="Export it again"):
        OnnxExtractor(device)


def test_vectors_that_differ_leave_no_file(devices, tmp_path, monkeypatch):
    from tightlip.vectors import halves

    copy = shutil.copytree(devices["lstm"], tmp_path / "device")
    model = onnx.load(str(copy / "device.onnx"))
    (copy / "device.onnx").unlink()

    def of_other_weights(extractor):
        extractor.model.embed_tokens.weight.data += 1
        return model

    monkeypatch.setattr(halves, "_exported", of_other_weights)
    with pytest.raises(UsageError, match="no file was written"):
        export_onnx(copy)
    assert sorted(names_in(copy)) == [
        "device.json",
        "extractor",
        "guarantee.json",
    ]
