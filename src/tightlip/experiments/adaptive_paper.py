"""`tightlip reproduce adaptive` as one call: Wu, Gong and Xiong 2022 on your own text.

No DP, plain DP and the three adaptive modes at σ 1 and 5, and again at equal ε: what each is
worth on held-out text, what it gives away of planted canaries, and who pays.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tightlip
from tightlip.audit.canaries.exposure import measure_canaries
from tightlip.core.devices import one_thread, usable_device
from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files, read_json, write_json
from tightlip.core.progress import task
from tightlip.core.register import kept_in
from tightlip.core.registry import unknown
from tightlip.core.run_folder import RunRecord
from tightlip.core.settings import takes
from tightlip.corpus.privacy_weights import minmax_weights
from tightlip.corpus.tables import stored_column
from tightlip.experiments import Reproduced, adaptive_text, claim_folder, scale_named, write_results
from tightlip.experiments.adaptive_tables import THIRDS, csv_text, result_of
from tightlip.experiments.adaptive_text import AdaptiveScale, Given, PlantedCorpus
from tightlip.privacy.noise_schedules import SCALES as NOISE_SCALES
from tightlip.scan.document_scores import DocumentScores
from tightlip.scan.scans import scans_of_run
from tightlip.training.config import RunOptions
from tightlip.training.run import train


def measured(run: RunRecord, planted: PlantedCorpus, path: Path, device: str) -> dict[str, Any]:
    """Losses and exposures of a finished run; kept in `path`, and read from there next time."""
    if path.exists():
        return dict(read_json(path))
    with scans_of_run(run, device=device, keep=False) as scans:
        scores = scans.scores(run.model_folder, planted.probe.corpus.train, "Scoring the probe")
    canaries = measure_canaries(run.folder, planted.keys, device=device)
    figures = {**losses(scores, planted), **exposures(canaries, planted)}
    write_json(path, figures)
    return figures


def losses(scores: DocumentScores, planted: PlantedCorpus) -> dict[str, Any]:
    """Nats a token on held-out text, over all of it and by thirds of ρ; beside each third the
    same of text that was trained on. The difference is what the model keeps of its training text."""
    held = planted.probe.is_held_out
    loss = nats_per_token(scores, held)
    rho, nats = planted.probe.weights.rho, planted.probe.weights.log_perplexities
    third = thirds(nats, scores.num_tokens > 0)
    rows = []
    for place, name in enumerate(THIRDS):
        here = third == place
        own, seen = (nats_per_token(scores, here & part) for part in (held, ~held))
        rows.append(
            {
                "third": name,
                "mean_rho": _mean(rho[here]),
                "num_documents": int((here & held).sum()),
                "loss_nats": own,
                "seen_loss_nats": seen,
                "kept_nats": None if own is None or seen is None else own - seen,
            }
        )
    perplexity = None if loss is None else float(np.exp(loss))
    return {"loss_nats": loss, "perplexity": perplexity, "thirds": rows}


def thirds(nats: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """0, 1 or 2 for the least, middling and most surprising documents, -1 for what is not counted.

    By log-perplexity, which ρ rises with: where many weights are cut off at the same bound, ρ
    would leave a third empty.

    >>> thirds(np.array([0.1, 0.9, 0.5, 0.2, 1.0, 0.6]), np.ones(6, bool)).tolist()
    [0, 2, 1, 0, 2, 1]
    """
    third = np.full(len(nats), -1)
    places = np.flatnonzero(counted)
    order = places[np.argsort(nats[places], kind="stable")]
    third[order] = np.arange(len(order)) * 3 // max(1, len(order))
    return third


def nats_per_token(scores: DocumentScores, chosen: np.ndarray) -> float | None:
    """Σ loss / Σ tokens over the chosen documents; None where they have no token."""
    num_tokens = scores.num_tokens[chosen].sum()
    return float(scores.loss_nats[chosen].sum() / num_tokens) if num_tokens else None


def exposures(canaries: list[dict[str, Any]], planted: PlantedCorpus) -> dict[str, Any]:
    """Bits of the paper's canary by insertions, and of those in public lines by thirds of their ρ."""
    known = {entry["text"]: entry["exposure_bits"] for entry in canaries}
    ids, carried = (read_json(key)["canaries"] for key in planted.keys)
    places = canary_places(planted, [canary["text"] for canary in carried])
    rho, nats = planted.weights.rho[places], planted.weights.log_perplexities[places]
    bits = np.array([known[canary["text"]] for canary in carried])
    third = thirds(nats, np.ones(len(nats), bool))
    return {
        "exposure": [
            {"repetitions": canary["repetitions"], "bits": known[canary["text"]]} for canary in ids
        ],
        "exposure_by_third": [
            {
                "third": name,
                "mean_rho": _mean(rho[third == place]),
                "num_canaries": int((third == place).sum()),
                "mean_bits": _mean(bits[third == place]),
            }
            for place, name in enumerate(THIRDS)
        ],
    }


def canary_places(planted: PlantedCorpus, texts: list[str]) -> list[int]:
    """Which document each canary is in training; its copies read alike and weigh alike."""
    stored = stored_column(planted.corpus.folder / "train.parquet", "text")
    place = {text: number for number, text in enumerate(stored)}
    return [place[text] for text in texts]


def mean_unit_weight(planted: PlantedCorpus) -> float:
    """The mean over units of a unit's mean weight: what a batch's mean is near."""
    if planted.unit == "example":
        return float(planted.weights.rho.mean())
    users = np.asarray(planted.corpus.train.users)
    sums, counts = np.bincount(users, planted.weights.rho), np.bincount(users)
    return float((sums[counts > 0] / counts[counts > 0]).mean())


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


MODES = ("dp", "clip", "scale", "as-published")
_SMALL_LSTM: dict[str, Any] = {
    "model": "lstm",
    "embedding_size": 64,
    "hidden_size": 64,
    "num_layers": 1,
    "sequence_length": 48,
}
_GPT: dict[str, Any] = {
    "model": "transformer",
    "num_layers": 4,
    "hidden_size": 256,
    "num_heads": 4,
    "sequence_length": 128,
}
_LSTM: dict[str, Any] = {"model": "lstm", "embedding_size": 256, "hidden_size": 256}
_SMOKE = AdaptiveScale(
    name="smoke",
    shape=_SMALL_LSTM,
    plain={"learning_rate": 5e-3, "batch_size": 32, "steps": 400},
    private={"learning_rate": 1e-2, "batch_size": 192, "steps": 40, "rows_per_unit": 1},
    public={**_SMALL_LSTM, "learning_rate": 5e-3, "batch_size": 32, "steps": 250},
    vocabulary_size=1_000,
    most_documents=3_000,
    most_probed=300,
)
_SMALL = AdaptiveScale(
    name="small",
    shape=_GPT,
    plain={"learning_rate": 1e-3, "batch_size": 64, "steps": 2_000},
    private={"learning_rate": 1e-3, "batch_size": 1_024, "steps": 200, "rows_per_unit": 1},
    public={**_LSTM, "learning_rate": 2e-3, "batch_size": 64, "epochs": 3.0},
    vocabulary_size=8_000,
    most_documents=40_000,
    num_carriers=48,
    carrier_words=(20, 60),
    bf16=True,
    physical_rows=256,
)
_THEIR_PACE: dict[str, Any] = {"learning_rate": 5e-5, "epochs": 20.0}
# Theirs, as far as the paper says; row length and vocabulary are ours, and so is the batch
# without noise: 4,096 rows do not fit a GPU at once, and only noise asks for so many.
_PAPER = replace(
    _SMALL,
    name="paper",
    shape={**_GPT, "num_layers": 12, "hidden_size": 1_024, "num_heads": 16},
    plain={**_THEIR_PACE, "batch_size": 128},
    private={**_THEIR_PACE, "batch_size": 4_096, "clip_norm": 0.001, "rows_per_unit": 1},
    vocabulary_size=30_000,
    most_documents=None,
    physical_rows=128,
)
SCALES = {scale.name: scale for scale in (_SMOKE, _SMALL, _PAPER)}


@takes()
def reproduce_adaptive(
    corpus: Sequence[str | Path] = (),
    *,
    public_model: str | Path | None = None,
    public_corpus: str | Path | None = None,
    scale: str = "smoke",
    unit: str = "auto",
    out: str | Path = "reproduce-adaptive",
    device: str = "auto",
) -> Reproduced:
    """Run the experiment on each corpus and write OUT/adaptive.json, .csv and .html.

    A corpus is a file with a column text, or user and text; without any it is the bundled plays.

    Holds:
        resumed: what an earlier start finished is kept, run by run and measure by measure.
        silent: no text and nobody's name is in the result.
    """
    size = scale_named(scale, SCALES)
    _check(corpus, public_model, public_corpus, unit)
    files = [Path(each) for each in (*corpus, *([] if public_corpus is None else [public_corpus]))]
    folder = claim_folder(
        Path(out),
        size,
        [Path(each) for each in corpus],
        text=digest_of_files(files) if all(each.is_file() for each in files) else None,
        public_model=None if public_model is None else str(Path(public_model).resolve()),
        unit=unit,
    )
    options = _options(size, device)
    # The bundled plays are public; runs on somebody's corpus are put on record as any others.
    register = nullcontext() if corpus else kept_in(folder)
    with one_thread() if scale == "smoke" else nullcontext(), register:
        public = adaptive_text.public_side(folder, public_corpus, public_model, size, options)
        sections = []
        for each in corpus or (None,):
            planted = adaptive_text.planted_corpus(folder, each, public, size, unit, device)
            sections.append(_section(planted, folder, size, options))
    result = result_of(
        sections,
        scale=size.name,
        public_model=public.model_words,
        public_corpus=public.corpus_words,
        version=tightlip.__version__,
        machine=_machine(device),
    )
    return write_results(folder, "adaptive", result, csv_text(result), page="adaptive-paper")


def _options(size: AdaptiveScale, device: str) -> RunOptions:
    """Where and how the runs are done. A CPU gains nothing from bfloat16."""
    if usable_device(device) == "cpu":
        return RunOptions(device=device)
    return RunOptions(device=device, bf16=size.bf16, physical_rows=size.physical_rows)


def _machine(device: str) -> str:
    """What the figures were made with, in words."""
    import torch
    import transformers

    used = usable_device(device)
    name = "the CPU" if used == "cpu" else torch.cuda.get_device_name(used)
    return f"torch {torch.__version__} and transformers {transformers.__version__} on {name}"


def _section(
    planted: PlantedCorpus, folder: Path, size: AdaptiveScale, options: RunOptions
) -> dict[str, Any]:
    """Every run on one corpus, measured."""
    rows = []
    with task(f"{planted.name}: runs", 1 + 6 * len(size.noise_multipliers)) as bar:
        for row in _Runs(planted, folder / planted.name, size, options):
            rows.append(row)
            bar.advance()
    weights = planted.weights
    paper = minmax_weights(weights.log_perplexities, weights.info["least_weight"])
    return {
        "name": planted.name,
        "unit": planted.unit,
        "num_documents": planted.corpus.train.num_documents,
        "num_users": planted.num_users,
        "num_units": planted.num_units,
        "mean_weight": mean_unit_weight(planted),
        "mean_minmax_weight": float(paper.mean()),
        "rows": rows,
    }


@dataclass(frozen=True)
class _Runs:
    """The runs on one corpus, one after the other: each is trained, measured and described."""

    planted: PlantedCorpus
    folder: Path
    size: AdaptiveScale
    options: RunOptions

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield self.row("none", None, "no noise", self.size.plain)
        epsilon_of = {}
        for sigma in self.size.noise_multipliers:
            for mode in MODES:
                row = self.row(mode, sigma, "same noise", {"noise_multiplier": sigma})
                if mode == "dp":
                    epsilon_of[sigma] = row["epsilon"]
                yield row
        for sigma in self.size.noise_multipliers:
            yield self.row("scale", sigma, "equal epsilon", {"epsilon": epsilon_of[sigma]})
            # Its ε cannot be aimed at; the noise of a batch is near σ times the mean weight.
            louder = {"noise_multiplier": sigma / mean_unit_weight(self.planted)}
            yield self.row("as-published", sigma, "equal epsilon", louder)

    def row(self, mode: str, sigma: float | None, kind: str, own: dict[str, Any]) -> dict[str, Any]:
        """`sigma` is plain DP's of the group; with equal ε this run's own noise may differ."""
        name = mode if sigma is None else f"{mode}-{sigma:g}"
        name += "-equal" if kind == "equal epsilon" else ""
        run = self._trained(name, mode, own)
        kept = self.folder / "measured" / f"{name}.json"
        figures = measured(run, self.planted, kept, self.options.device)
        return {"run": name, "mode": mode, "kind": kind, "sigma": sigma, **_promise(run), **figures}

    def _trained(self, name: str, mode: str, own: dict[str, Any]) -> RunRecord:
        settings: dict[str, Any] = {**self.size.shape, "snapshot": "none", "seed": 0}
        if mode != "none":
            fits = min(self.size.private["batch_size"], max(1, self.planted.num_units // 4))
            settings |= self.size.private | {"unit": self.planted.unit, "batch_size": fits}
            settings["mitigation"] = "dp" if mode == "dp" else "adaptive-dp"
            settings |= {} if mode == "dp" else {"adaptive": mode}
        to = self.folder / "runs" / name
        return train(self.planted.corpus, to, options=self.options, **settings | own)


def _promise(run: RunRecord) -> dict[str, Any]:
    """What a run's ledger says, with its noise as it was set."""
    ledger = run.guarantee
    adaptive = ledger.get("adaptive") or {}
    copied = ("epsilon", "delta", "unit", "standing", "because", "accountant", "steps")
    return {
        **{name: ledger.get(name) for name in (*copied, "arithmetic")},
        "planned_steps": adaptive.get("planned_steps", ledger.get("steps")),
        "stop": run.stop,
        "noise_multiplier": adaptive.get("noise_multiplier", ledger.get("noise_multiplier")),
        "last_noise_multiplier": _last_noise(run),
    }


def _last_noise(run: RunRecord) -> float | None:
    """The noise of the last step of a run in mode `scale`, which is public; None of others."""
    path = run.folder / NOISE_SCALES
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["noise_multiplier"]) if lines else None


def _check(
    corpus: Sequence[str | Path], public_model: Given, public_corpus: Given, unit: str
) -> None:
    if unit not in ("auto", "user", "example"):
        raise UsageError(unknown("unit", unit, ["auto", "user", "example"]))
    if corpus and public_corpus is None:
        raise UsageError(
            f"corpus={[str(each) for each in corpus]} without public text: the tokenizer and the weights' constants must come "
            "from text that is nobody's secret. Add --public-corpus FILE."
        )
    for path in (*corpus, public_model, public_corpus):
        if path is not None and not Path(path).exists():
            raise UsageError(f"{path} does not exist. Nothing is downloaded: give a path on disk.")
