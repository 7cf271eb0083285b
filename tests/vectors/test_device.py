import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from by_hand import unlisted
from tightlip.core.errors import UsageError
from tightlip.vectors.encode import Device, load_device
from tightlip.vectors.extractors import Raw, pieces
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.halves import export_onnx
from tightlip.vectors.release import on_grid
from tightlip.vectors.server import VectorFile, load_server
from tightlip.vectors.vector_accounting import GRID_STEP
from vectors.tiny_halves import LABELS, TEXTS, write_halves

QUIET = {"mechanism": "laplace-as-published", "dimensions": 16, "epsilon": 2000.0}


class Listening:
    """An extractor that writes down what it was given; a text's vector is told by its words."""

    def __init__(self):
        self.heard = []

    def stream(self, texts, *, prepared, batch_size, device):
        for places in pieces(np.arange(len(texts)), 5):
            yield Raw(places, partial(self.encode, prepared(places)))

    def encode(self, texts):
        self.heard += texts
        rows = [np.random.default_rng(abs(hash(text)) % 2**32).normal(size=16) for text in texts]
        return np.array(rows, np.float32).reshape(len(texts), 16)


def listening(**changed):
    mechanism = VectorMechanism(**QUIET | changed)
    return Device(Listening(), mechanism, mask_word="[MASK]", pair="p")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_halves(folder, dropout=0.25)
    return folder


def test_words_are_masked_before_the_extractor_reads_them():
    half = listening(dropout=0.5)
    half.encode(["Anna went home today", "one"], marked=["anna"])
    first, second = half.extractor.heard
    assert first.split()[0] == "[MASK]"
    assert first.split().count("[MASK]") == 3
    assert second == "[MASK]"


def test_what_leaves_is_the_grid_value_of_each_text_in_order_with_noise():
    half = listening()
    texts = [f"text {number}" for number in range(13)]
    found = half.encode(texts)
    raw = Listening().encode(texts)
    off = np.abs(found - on_grid(raw, half.mechanism) * GRID_STEP)
    assert 0 < off.max() < 40 * half.mechanism.noise_scale
    assert half.encode([]).shape == (0, 16)


def test_each_text_of_a_streaming_extractor_gets_its_own_vector_marks_and_noise(tmp_path):
    """Texts of many lengths in batches of 3, so that they are read in another order."""
    write_halves(tmp_path, mechanism="laplace-as-published", epsilon=500.0)
    half = load_device(tmp_path / "device")
    texts = [" ".join(["cat", "dog", "mat", "park"][: n % 4 + 1] * (n % 3 + 1)) for n in range(31)]
    marked = [["cat"] if n % 2 else ["park"] for n in range(31)]
    read = [
        text.replace(words[0], half.mask_word) for text, words in zip(texts, marked, strict=True)
    ]
    wanted = on_grid(half.extractor.encode(read), half.mechanism) * GRID_STEP
    found = [half.encode(texts, marked=marked, batch_size=3) for _ in range(2)]
    for each in found:
        assert np.abs(each - wanted).max() < 20 * half.mechanism.noise_scale
    noise = np.stack([each - wanted for each in found]).reshape(62, -1)
    assert len({tuple(row) for row in noise.tolist()}) == 62
    assert np.abs(np.corrcoef(noise[:31].ravel(), noise[31:].ravel())[0, 1]) < 0.25


def test_many_texts_are_masked_with_their_own_marks_in_order():
    half = listening(mechanism="none", epsilon=None)
    half.encode([f"a{n} b{n}" for n in range(11)], marked=[[f"b{n}"] for n in range(11)])
    assert half.extractor.heard == [f"a{n} [MASK]" for n in range(11)]


def test_the_same_text_again_has_other_masks_and_other_noise():
    half = listening(dropout=0.5)
    found = half.encode(["a b c d e f g h"] * 40)
    assert len({tuple(row) for row in found.tolist()}) == 40
    assert len(set(half.extractor.heard)) > 5


def test_no_two_devices_draw_the_same_masks():
    texts = ["a b c d e f g h i j k l"] * 8
    one, other = listening(dropout=0.5), listening(dropout=0.5)
    one.encode(texts)
    other.encode(texts)
    assert one.extractor.heard != other.extractor.heard


def test_a_forked_process_draws_masks_of_its_own():
    """Parent and child mask the same texts with one device; 8 texts of 924 masks each."""
    half, texts = listening(dropout=0.5), ["a b c d e f g h i j k l"] * 8
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, "|".join(half._masked(texts, [frozenset()] * 8)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        assert stream.read() not in ("", "|".join(half._masked(texts, [frozenset()] * 8)))


def test_raw_vectors_are_never_released_where_the_mechanism_has_noise():
    half = listening(epsilon=0.05)
    texts = [f"text {number}" for number in range(300)]
    noise = half.encode(texts) - Listening().encode(texts)
    assert np.abs(noise).mean() == pytest.approx(20, rel=0.1)


def test_bare_vectors_are_normalised_only():
    half = listening(mechanism="none", epsilon=None)
    found = half.encode(["a", "b"])
    assert found.min(axis=1).tolist() == [0, 0]
    assert found.max(axis=1).tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["bag", "lstm"])
@pytest.mark.parametrize("mechanism", ["laplace-as-published", "gaussian", "none"])
def test_empty_text_one_word_and_text_beyond_the_window_are_vectors_like_any_other(
    tmp_path, kind, mechanism
):
    epsilon = {"none": None}.get(mechanism, 1.0)
    write_halves(tmp_path, kind=kind, mechanism=mechanism, epsilon=epsilon, dropout=0.3)
    found = load_device(tmp_path / "device").encode(["", " ", "cat", "cat " * 500, "[MASK] [CLS]"])
    assert found.shape == (5, 16)
    assert np.isfinite(found).all()


def test_the_halves_load_without_each_other(run, tmp_path):
    for name in ("device", "server"):
        shutil.copytree(run / name, tmp_path / name / name)
    vectors = load_device(tmp_path / "device/device").encode(TEXTS)
    labels, chances = load_server(tmp_path / "server/server").classify(vectors)
    assert set(labels) <= set(LABELS)
    assert chances.sum(axis=1) == pytest.approx(np.ones(len(TEXTS)))


def test_a_loaded_device_has_the_noise_its_record_states(run):
    half = load_device(run / "device")
    raw = half.extractor.encode(TEXTS, batch_size=4, device="cpu")
    many = half.encode(TEXTS * 200, marked=["nothing"])
    assert half.mechanism.noise_scale == 2.0
    assert many.std() == pytest.approx(np.sqrt(2) * 2.0, rel=0.05)
    assert raw.shape == (len(TEXTS), 16)


def change(path, **changed):
    about = json.loads(path.read_text())
    unlisted(path).write_text(json.dumps(about | changed))


def test_a_device_whose_guarantee_was_changed_is_refused(run, tmp_path):
    shutil.copytree(run / "device", tmp_path / "device")
    record = json.loads((tmp_path / "device/guarantee.json").read_text())
    change(tmp_path / "device/device.json", guarantee=record | {"epsilon": 0.01})
    with pytest.raises(UsageError, match="claims epsilon"):
        load_device(tmp_path / "device")
    change(tmp_path / "device/device.json", guarantee=record | {"because": "trust me"})
    with pytest.raises(UsageError, match="says because"):
        load_device(tmp_path / "device")
    higher = record | {"epsilon": record["epsilon"] + 1}
    change(tmp_path / "device/device.json", guarantee=higher)
    with pytest.raises(UsageError, match="different guarantees"):
        load_device(tmp_path / "device")
    wider = VectorMechanism(mechanism="laplace", dimensions=17, epsilon=1.0).record()
    change(tmp_path / "device/device.json", guarantee=wider)
    with pytest.raises(UsageError, match="its guarantee is for 17"):
        load_device(tmp_path / "device")


def test_what_is_no_device_or_no_runtime_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="no device's half"):
        load_device(run)
    with pytest.raises(UsageError, match="Unknown runtime"):
        load_device(run / "device", runtime="tpu")
    with pytest.raises(UsageError, match="holds no text"):
        load_device(run / "device").encode(["a"], batch_size=0)


def test_a_server_classifies_as_its_classifier_and_only_vectors_of_its_device(run):
    half, server = load_device(run / "device"), load_server(run / "server")
    vectors = half.encode(TEXTS)
    labels, chances = server.classify(vectors)
    logits = server.classifier(torch.from_numpy(vectors))
    assert [LABELS[n] for n in logits.argmax(dim=1)] == labels
    assert chances == pytest.approx(logits.softmax(dim=1).detach().numpy(), abs=1e-6)
    record = half.mechanism.record()
    ours = VectorFile(vectors=vectors, columns={}, record=record, pair=half.pair)
    assert server.classify(ours)[0] == labels
    with pytest.raises(UsageError, match="belong to the pair"):
        server.classify(VectorFile(vectors=vectors, columns={}, record=record, pair="another"))
    with pytest.raises(UsageError, match="16 dimensions"):
        server.classify(vectors[:, :5])


@pytest.mark.parametrize(
    "lowered",
    [
        {"dropout": 0.9},
        {"epsilon": 0.25},
        {"mechanism": "laplace", "epsilon": 1.0},
        {"mechanism": "none", "epsilon": None},
        {"delta": 1e-3},
    ],
    ids=str,
)
def test_vectors_whose_record_tells_of_other_noise_than_their_pairs_are_refused(run, lowered):
    half, server = load_device(run / "device"), load_server(run / "server")
    vectors = half.encode(TEXTS)
    given = {"mechanism": "laplace-as-published", "dimensions": 16, "epsilon": 0.5, "dropout": 0.25}
    record = VectorMechanism(**given | lowered).record()
    with pytest.raises(UsageError, match="other noise"):
        server.classify(VectorFile(vectors=vectors, columns={}, record=record, pair=half.pair))
    less = half.mechanism.record() | {"epsilon": 0.1}
    with pytest.raises(UsageError, match="claims epsilon"):
        server.classify(VectorFile(vectors=vectors, columns={}, record=less, pair=half.pair))


@pytest.mark.slow
def test_a_tokenizer_of_another_training_is_refused_by_onnx_too(tmp_path):
    write_halves(tmp_path)
    export_onnx(tmp_path / "device")
    tokenizer = tmp_path / "device/extractor/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("cat", "cot"))
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_device(tmp_path / "device", runtime="onnx")


@pytest.mark.slow
def test_a_device_runs_by_onnx_without_the_weights(tmp_path):
    write_halves(tmp_path, mechanism="none", epsilon=None)
    export_onnx(tmp_path / "device")
    by_torch = load_device(tmp_path / "device").encode(TEXTS)
    (tmp_path / "device/extractor/model.safetensors").unlink()
    by_onnx = load_device(tmp_path / "device", runtime="onnx").encode(TEXTS)
    assert by_onnx == pytest.approx(by_torch, abs=1e-4)
