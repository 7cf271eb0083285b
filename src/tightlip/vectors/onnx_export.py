"""An extractor as one ONNX file, and running it without torch's weights.

`device.onnx` takes `input_ids` and `attention_mask`, int64 of any number of rows and positions,
and gives `vector`, the raw pooled vector of each row. Masking, normalising and noise stay outside.
"""

import logging
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import written_whole
from tightlip.models.loading import load_tokenizer
from tightlip.vectors.extractors import Extractor, Tokenised
from tightlip.vectors.halves import DEVICE, EXTRACTOR, load_extractor, read_half
from tightlip.vectors.settings import EncodingOptions

ONNX = "device.onnx"
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "vector"
_PAIR = "tightlip_pair"
# Two roundings of one sum: torch and ONNX Runtime add in different orders.
_TOLERANCE = 1e-4


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
    with written_whole(path, alone=out is not None) as beside:
        beside.write_bytes(model.SerializeToString())
        _check_equal(extractor, beside)
    return path


def _exported(extractor: Extractor) -> Any:
    """The model as ONNX has it, for any number of rows and any length up to the window."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _needed(name)
    example = extractor.tokenize(
        ["one text", "and another, a little longer than the one before it"]
    )
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
    """The extractor of a device's half as ONNX Runtime runs it; torch's weights are not read.

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
        pair = self._session.get_modelmeta().custom_metadata_map.get(_PAIR)
        if pair != about["pair"]:
            raise UsageError(
                f"{path} was exported from another training than {device}. Run: tightlip represent export {device} --onnx"
            )
        self.tokenizer = load_tokenizer(device / EXTRACTOR)
        self.tokenizer.padding_side = self.tokenizer.truncation_side = "right"
        self.max_tokens: int = about["max_tokens"]
        self.dimensions: int = about["dimensions"]
        self.kind, self.pooling = about["extractor"], about["pooling"]

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = EncodingOptions.batch_size,
        device: Any = None,
    ) -> np.ndarray:
        """The raw vectors of `texts`, float32, in their order; ONNX Runtime runs on the CPU here."""
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        for places, batch in self.batches(texts, batch_size):
            vectors[places] = _run(self._session, batch)
        return vectors


def _run(session: Any, batch: dict[str, torch.Tensor]) -> np.ndarray:
    (vectors,) = session.run([OUTPUT], {name: batch[name].numpy() for name in INPUTS})
    return np.asarray(vectors)


def _session(path: Path) -> Any:
    runtime = _needed("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors; its warnings speak of the graph's inside
    try:
        # From memory: a path would let the graph name further files to read.
        return runtime.InferenceSession(
            checked(path).read_bytes(), options, providers=["CPUExecutionProvider"]
        )
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
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} is not installed, and ONNX needs it. Run: pip install 'tightlip[represent]'"
        ) from error
