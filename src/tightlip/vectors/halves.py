"""The two halves of a trained model, as they are deployed: files that either side loads alone.

device/  extractor and guarantee: turns texts into vectors, knows nothing of the classifier
server/  the classifier: turns vectors into labels, knows nothing of the extractor

`device.onnx` is the extractor for another runtime, which needs none of torch's weights. It takes
`input_ids` and `attention_mask`, int64 of any number of rows and positions, and gives `vector`, the
raw pooled vector of each row. Masking, normalising and noise stay outside.
"""

import hashlib
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tightlip.core import files
from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.models.checks import without_progress_bar
from tightlip.models.folders import state_fingerprint
from tightlip.models.loading import load_tokenizer
from tightlip.vectors.extractors import Extractor, Tokenised, open_extractor
from tightlip.vectors.guarantees import VectorMechanism

FORMAT = 1
DEVICE, SERVER = "device", "server"
EXTRACTOR, GUARANTEE, WEIGHTS = "extractor", "guarantee.json", "model.safetensors"
_TOLD = ("pooling", "max_tokens", "dimensions", "mask_word")  # of an extractor
_NEEDED = {
    DEVICE: ("extractor", *_TOLD, "guarantee", "pair", "files"),
    SERVER: ("labels", "dimensions", "pair", "hidden"),
}
# What settles the noise of a record: numbers that are read back as they were written.
_NOISE = (
    *("mechanism", "dimensions", "normalisation", "noise_scale"),
    *("grid_step", "dropout", "target_epsilon", "delta"),
)
ONNX = "device.onnx"
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "vector"
_PAIR = "tightlip_pair"
# Two roundings of one sum: torch and ONNX Runtime add in different orders.
_TOLERANCE = 1e-4


class Classifier(nn.Module):
    """Vectors in, one logit per label out: linear, or through a hidden layer.

    Released vectors carry noise many times as wide as they are. `center` and `width` bring them
    to about the size that a freshly made layer expects.
    """

    center: Tensor
    width: Tensor

    def __init__(
        self,
        dimensions: int,
        labels: Sequence[str],
        *,
        hidden: int = 0,
        center: float = 0.0,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        self.dimensions, self.labels, self.hidden = dimensions, list(labels), hidden
        self.register_buffer("center", torch.tensor(center))
        self.register_buffer("width", torch.tensor(width))
        last = nn.Linear(hidden or dimensions, len(self.labels))
        layers = [nn.Linear(dimensions, hidden), nn.ReLU()] if hidden else []
        self.layers = nn.Sequential(nn.Dropout(0.1), *layers, last)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers((vectors - self.center) / self.width)


def noise_classifier(
    labels: Sequence[str], mechanism: VectorMechanism, *, hidden: int
) -> Classifier:
    """A classifier that expects vectors as wide as this mechanism's noise makes them."""
    in_a_ball = mechanism.normalisation == "unit-ball"
    own = 1 / mechanism.dimensions if in_a_ball else 0.25  # the largest variance without noise
    noise = mechanism.noise_scale**2 * (1 if mechanism.mechanism == "gaussian" else 2)
    return Classifier(
        mechanism.dimensions,
        labels,
        hidden=hidden,
        center=0.0 if in_a_ball else 0.5,
        width=math.sqrt(own + noise),
    )


def pair_id(extractor: Extractor, classifier: Classifier, record: dict[str, Any]) -> str:
    """What both halves of one training carry, and the halves of no other.

    Its last part is the print of the noise, so that the server knows what its vectors must promise.
    """
    digest = hashlib.sha256(state_fingerprint(extractor).encode())
    digest.update(state_fingerprint(classifier).encode())
    digest.update(json.dumps([classifier.labels, record], sort_keys=True).encode())
    return f"{digest.hexdigest()[:32]}-{noise_print(record)}"


def noise_print(record: dict[str, Any]) -> str:
    """Which noise a guarantee record describes, in 32 characters; its figures follow from that."""
    noise = json.dumps([record.get(name) for name in _NOISE])
    return hashlib.sha256(noise.encode()).hexdigest()[:32]


def write_device(folder: Path, extractor: Extractor, record: dict[str, Any], pair: str) -> None:
    """Write the device's half whole or not at all; an earlier one gives way."""
    shutil.rmtree(folder, ignore_errors=True)
    with files.folder_written_whole(folder) as beside:
        with without_progress_bar():
            extractor.model.save_pretrained(beside / EXTRACTOR)
            extractor.tokenizer.save_pretrained(beside / EXTRACTOR)
        files.write_json(beside / GUARANTEE, record)
        about = {
            "format": FORMAT,
            "kind": f"tightlip-{DEVICE}",
            "extractor": extractor.kind,
            **{name: getattr(extractor, name) for name in _TOLD},
            "guarantee": record,
            "pair": pair,
            "files": _prints(beside / EXTRACTOR),
        }
        files.write_json(beside / f"{DEVICE}.json", about)


def _prints(folder: Path) -> dict[str, str]:
    """The SHA-256 of each of an extractor's files; hidden ones, of file managers, are passed over."""
    there = [path for path in sorted(folder.rglob("[!.]*")) if path.is_file()]
    return {str(path.relative_to(folder)): files.digest_of_files([path]) for path in there}


def check_files(folder: Path, about: dict[str, Any], *, weights: bool = True) -> None:
    """Refuse an extractor whose weights, settings or tokenizer are not those of device.json.

    Without `weights` these are not compared, and need not be there.
    """
    there, wanted = _prints(folder / EXTRACTOR), dict(about["files"])
    names = sorted(there.keys() | wanted.keys())
    if other := [n for n in names if there.get(n) != wanted.get(n) and (weights or n != WEIGHTS)]:
        raise UsageError(
            f"{', '.join(other)} in {folder / EXTRACTOR} are not those that device.json was written with. "
            "They come from two trainings, or were changed: copy the folder again."
        )


def write_server(folder: Path, classifier: Classifier, pair: str) -> None:
    """Write the server's half whole or not at all; an earlier one gives way."""
    shutil.rmtree(folder, ignore_errors=True)
    with files.folder_written_whole(folder) as beside:
        weights = classifier.state_dict()
        save_file({name: weights[name].cpu().contiguous() for name in weights}, beside / WEIGHTS)
        about = {
            "format": FORMAT,
            "kind": f"tightlip-{SERVER}",
            **{name: getattr(classifier, name) for name in ("labels", "dimensions", "hidden")},
            "pair": pair,
        }
        files.write_json(beside / f"{SERVER}.json", about)


def read_half(folder: Path, kind: str) -> dict[str, Any]:
    """What device.json or server.json says, checked to be such a file."""
    path = Path(folder) / f"{kind}.json"
    if not path.is_file():
        inner = Path(folder) / kind
        hint = f" Give {inner}." if (inner / path.name).is_file() else ""
        raise UsageError(
            f"{folder} is no {kind}'s half: it has no {path.name}.{hint or ' Run: tightlip represent train'}"
        )
    about = files.read_json(path)
    if not isinstance(about, dict) or about.get("kind") != f"tightlip-{kind}":
        raise UsageError(
            f"{path} does not describe a {kind}'s half. Give a folder of `tightlip represent train`."
        )
    if about.get("format") != FORMAT:
        raise UsageError(
            f"{path} has format {about.get('format')!r}, and this tightlip reads {FORMAT}. Update tightlip, or train again."
        )
    if missing := [name for name in _NEEDED[kind] if name not in about]:
        raise UsageError(
            f"{path} lacks {', '.join(missing)}. Copy the folder again, or train again."
        )
    return about


def load_extractor(folder: Path | str) -> Extractor:
    """The extractor of a device's half, in evaluation mode.

    Holds:
        alone: nothing outside `folder` is read.
        nothing_executed: code and pickles in the folder are never run.
        its_own: files of another training are refused.
    """
    folder = Path(folder)
    about = read_half(folder, DEVICE)
    check_files(folder, about)
    told = {name: about[name] for name in ("pooling", "max_tokens")}
    extractor = open_extractor(folder / EXTRACTOR, kind=about["extractor"], **told)
    if (extractor.dimensions, extractor.mask_word) != (about["dimensions"], about["mask_word"]):
        raise UsageError(
            f"{folder}/{EXTRACTOR} gives {extractor.dimensions} dimensions and masks with {extractor.mask_word}; "
            f"device.json says {about['dimensions']} and {about['mask_word']}. They come from two trainings: copy the folder again."
        )
    return extractor.eval()


def load_classifier(folder: Path | str) -> Classifier:
    """The classifier of a server's half, in evaluation mode."""
    folder = Path(folder)
    about = read_half(folder, SERVER)
    classifier = Classifier(about["dimensions"], about["labels"], hidden=about["hidden"])
    try:
        classifier.load_state_dict(load_file(checked(folder / WEIGHTS)))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"{folder / WEIGHTS} is not the classifier that server.json describes ({reason}). Copy the folder again."
        ) from error
    return classifier.eval()


# The device's half as ONNX


def export_onnx(device: Path, out: Path | None = None) -> Path:
    """Write the extractor of a device's half as ONNX, by default as device.onnx beside it.

    Holds:
        equal: ONNX Runtime's vectors are torch's, up to rounding, for any number and length of texts.
        whole: a file whose vectors differ from torch's is not left behind.
    """
    path = device / ONNX if out is None else out
    about, extractor = read_half(device, DEVICE), load_extractor(device)
    model = _exported(extractor)
    entry = model.metadata_props.add()
    entry.key, entry.value = _PAIR, about["pair"]
    with files.written_whole(path, alone=out is not None) as beside:
        beside.write_bytes(model.SerializeToString())
        _check_equal(extractor, beside)
    return path


def _exported(extractor: Extractor) -> Any:
    """The model as ONNX has it, for any number of rows and any length up to the window."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _needed(name)
    texts = ["one text", "and another, a little longer than the one before it"]
    example = extractor.tokenize(texts)
    rows = torch.export.Dim("rows")
    positions = torch.export.Dim("positions", max=extractor.max_tokens)
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    with warnings.catch_warnings():
        # About names of axes, packages we need not, and classes that torch itself is to replace.
        warnings.simplefilter("ignore")
        exporter.setLevel(logging.ERROR)
        program = torch.onnx.export(
            extractor,
            tuple(example[name] for name in INPUTS),
            dynamo=True,
            verbose=False,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_shapes={name: {0: rows, 1: positions} for name in INPUTS},
        )
    exporter.setLevel(level)
    assert program is not None
    return program.model_proto


def _check_equal(extractor: Extractor, path: Path) -> None:
    texts = ["", "one", "a text of several words, with a comma"]
    there, wanted = _run(_session(path), extractor.tokenize(texts)), extractor.encode(texts)
    if np.abs(there - wanted).max() > _TOLERANCE * max(1.0, float(np.abs(wanted).max())):
        raise UsageError(
            "ONNX Runtime gives other vectors than torch for this extractor, so no file was written. Run it with torch."
        )


class OnnxExtractor(Tokenised):
    """The extractor of a device's half as ONNX Runtime runs it, on the CPU; torch's weights are not
    read.

    Holds:
        same_pair: a device.onnx of another training is a usage error.
    """

    def __init__(self, device: Path) -> None:
        about, path = read_half(device, DEVICE), device / ONNX
        if not path.is_file():
            raise UsageError(
                f"{path} does not exist. Run: tightlip represent export {device} --onnx"
            )
        self._session = _session(path)
        if self._session.get_modelmeta().custom_metadata_map.get(_PAIR) != about["pair"]:
            raise UsageError(
                f"{path} was exported from another training than {device}. Run: tightlip represent export {device} --onnx"
            )
        self.tokenizer = load_tokenizer(device / EXTRACTOR)
        self.tokenizer.padding_side = self.tokenizer.truncation_side = "right"
        self.max_tokens, self.dimensions = about["max_tokens"], about["dimensions"]

    def _arriving(self, batch: dict[str, Tensor]) -> Callable[[], np.ndarray]:
        return partial(_run, self._session, batch)


def _run(session: Any, batch: dict[str, Tensor]) -> np.ndarray:
    (vectors,) = session.run([OUTPUT], {name: batch[name].numpy() for name in INPUTS})
    return np.asarray(vectors)


def _session(path: Path) -> Any:
    runtime = _needed("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors; its warnings speak of the graph's inside
    try:
        # From memory: a path would let the graph name further files to read.
        model = checked(path).read_bytes()
        return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except _runtime_errors(runtime) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"{path} is not a model that ONNX Runtime loads ({reason}). Export it again."
        ) from error


def _runtime_errors(runtime: Any) -> tuple[type[BaseException], ...]:
    state = runtime.capi.onnxruntime_pybind11_state
    names = ("InvalidProtobuf", "InvalidGraph", "Fail", "InvalidArgument", "NotImplemented")
    return (RuntimeError, *(getattr(state, name) for name in names if hasattr(state, name)))


def _needed(name: str) -> Any:
    return needed(name, f"{name} is not installed, and ONNX needs it.")


def needed(name: str, lacking: str) -> Any:
    """The module of that name; without it, what is `lacking` and the line that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(f"{lacking} Run: pip install 'tightlip[represent]'") from error
