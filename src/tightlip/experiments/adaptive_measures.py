"""What one run of `tightlip reproduce adaptive` is good for and gives away, by how rare text is."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tightlip.audit.canaries.exposure import measure_canaries
from tightlip.core.files import read_json, write_json
from tightlip.core.run_folder import RunRecord
from tightlip.experiments.adaptive_text import PlantedCorpus
from tightlip.scan.document_scores import DocumentScores
from tightlip.scan.models import scans_of_run

THIRDS = ("ordinary", "middling", "rare")


def measured(run: RunRecord, planted: PlantedCorpus, path: Path, device: str) -> dict[str, Any]:
    """Losses and exposures of a finished run; kept in `path`, and read from there next time."""
    if path.exists():
        return dict(read_json(path))
    corpus = planted.probe.corpus.train
    with scans_of_run(run, device=device, keep=False) as scans:
        scores = scans.scores(run.model_folder, corpus, "Scoring the probe")
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
    return {
        "loss_nats": loss,
        "perplexity": None if loss is None else float(np.exp(loss)),
        "thirds": rows,
    }


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
    stored = pq.read_table(planted.corpus.folder / "train.parquet", columns=["text"])["text"]
    place = {text: number for number, text in enumerate(stored.to_pylist())}
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
