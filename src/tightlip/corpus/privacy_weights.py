"""How rare each training document is to a public model, as a weight ρ in (0, 1].

    weights/log_perplexities.npy         float64, nats a token of each document of train/, NaN where none was scored
    weights/rho.npy                      float64, the weights
    weights/public_log_perplexities.npy  the same of the public corpus' documents, where there is one
    weights/info.json                    how they were made, and of which text
    weights/weights.html                 the rarest and the most ordinary documents, for a person

Adaptive differential privacy (training) reads them. A weight says that a text is rare, not that it is private.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tightlip.core.checksums import checked
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import folder_written_whole, read_json, write_json, write_text
from tightlip.core.settings import Settings, setting

FOLDER, PAGE = "weights", "weights.html"
LOG_PERPLEXITIES, RHO, INFO = "log_perplexities.npy", "rho.npy", "info.json"
PUBLIC_LOG_PERPLEXITIES = "public_log_perplexities.npy"
SOUND = ("public", "public-rank")
NORMALISATIONS = (*SOUND, "minmax", "rank")
QUANTILES = (0.05, 0.95)  # of the public corpus: a and b
UNSCORED = 1.0  # the weight of a document without a scored token
# Log-perplexities are kept to so many nats. A batch's other documents move a mean by rounding, 1e-6
# to 5e-5 nats; on a grid they move nothing, so that no weight depends on anybody else's text.
GRID_NATS = 0.01
INFO_KEYS = (
    *("normalisation", "is_sound", "estimator", "model", "model_fingerprint", "public_corpus"),
    *("public_corpus_fingerprint", "a", "b", "least_weight", "text_fingerprint", "shared"),
    "version",
)


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Settings):
    """What decides the weights. Without `public_model`: word frequencies of the public corpus."""

    panel: ClassVar[str | None] = "Privacy weights"

    public_model: str | Path | None = setting(
        None,
        "With weights: a public causal language model, a folder or a .gguf file.",
        path="MODEL",
    )
    public_corpus: str | Path | None = setting(
        None, "With weights: public text that says what is ordinary.", path="CORPUS"
    )
    weights: str = setting(
        "public",
        "How they are normalised; minmax and rank are for as-published only.",
        choices=NORMALISATIONS,
    )
    least_weight: float = setting(0.05, "No weight is below this.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least_weight < 1:
            raise UsageError(
                f"least_weight={self.least_weight} is not between 0 and 1. A weight of 0 would leave a document without "
                "noise, and 1 would make all weights equal. Use 0.05."
            )
        self._check_public_corpus()
        for name in ("public_model", "public_corpus"):
            if (given := getattr(self, name)) is not None and not Path(given).exists():
                raise UsageError(
                    f"{name}={str(given)!r} does not exist. Nothing is downloaded: give the path of a copy on disk."
                )

    def _check_public_corpus(self) -> None:
        if self.public_corpus is not None:
            return
        if self.public_model is None:
            raise UsageError(
                "Privacy weights are measured by a public model or by the words of a public corpus, and neither is given. "
                "Add --public-model DIR and --public-corpus FILE."
            )
        if self.weights in SOUND:
            raise UsageError(
                f"weights={self.weights!r} takes its constants from a public corpus, and none is given. Add --public-corpus "
                "FILE; --weights minmax or rank needs none, for mode as-published only."
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivacyWeights:
    """A weight for each training document, what it was made from, and how."""

    rho: np.ndarray
    log_perplexities: np.ndarray
    info: dict[str, Any]


# From log-perplexities to weights


def on_grid(nats: np.ndarray) -> np.ndarray:
    """Rounded to the grid that log-perplexities are kept on."""
    return np.round(nats / GRID_NATS) * GRID_NATS


def near_an_edge(nats: np.ndarray, tolerance: float) -> np.ndarray:
    """Which values a change of `tolerance` could round the other way.

    >>> near_an_edge(np.array([1.2349, 1.2351, 1.231, np.nan]), 0.0002).tolist()
    [True, True, False, False]
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(on_grid(nats - tolerance) != on_grid(nats + tolerance)) & ~np.isnan(nats)


def public_constants(public: np.ndarray) -> tuple[float, float]:
    """a and b: the 5% and 95% quantiles of a public corpus' log-perplexities."""
    low, high = np.quantile(_scored(public), QUANTILES)
    if not high > low:
        raise UsageError(
            f"The public corpus' documents all have the same perplexity ({np.exp(low):.4g} between its 5% and 95% "
            "quantiles), so it cannot say what is rare. Give a larger public corpus."
        )
    return float(low), float(high)


def public_weights(nats: np.ndarray, a: float, b: float, least: float) -> np.ndarray:
    """ρ = clip((ln P − a)/(b − a), ρ_min, 1).

    Holds:
        own_text_only: a document's weight depends on its own log-perplexity and public constants.

    >>> public_weights(np.array([1.0, 3.0, 9.0, np.nan]), 2.0, 4.0, 0.05).tolist()
    [0.05, 0.5, 1.0, 1.0]
    """
    return _weights((nats - a) / (b - a), least)


def public_rank_weights(nats: np.ndarray, public: np.ndarray, least: float) -> np.ndarray:
    """The share of public documents at most as surprising, clipped to [ρ_min, 1].

    Holds:
        own_text_only: a document's weight depends on its own log-perplexity and public text.

    >>> public_rank_weights(np.array([0.5, 2.0, 9.0]), np.array([1.0, 2.0, 3.0, 4.0]), 0.05).tolist()
    [0.05, 0.5, 1.0]
    """
    known = np.sort(_scored(public))
    shares = np.searchsorted(known, nats, side="right") / len(known)
    return _weights(np.where(np.isnan(nats), np.nan, shares), least)


def minmax_weights(nats: np.ndarray, least: float) -> np.ndarray:
    """The paper's: perplexities (not their logarithms) stretched over the corpus' own range.

    Every weight depends on the corpus' extremes, so one document moves all the others.

    >>> minmax_weights(np.log([10.0, 55.0, 100.0]), 0.05).round(6).tolist()
    [0.05, 0.5, 1.0]
    """
    known = nats[~np.isnan(nats)]
    if not len(known) or known.max() == known.min():
        return np.full(len(nats), UNSCORED)
    # Divided by the largest perplexity, which alone could overflow; each is then 1 + expm1.
    above, lowest = np.expm1(nats - known.max()), np.expm1(known.min() - known.max())
    return _weights((above - lowest) / -lowest, least)


def rank_weights(nats: np.ndarray, least: float) -> np.ndarray:
    """The share of the corpus' own documents at most as surprising: one absurd text moves the
    others by a place only, but it does move them."""
    known = nats[~np.isnan(nats)]
    return public_rank_weights(nats, known, least) if len(known) else np.full(len(nats), UNSCORED)


def weights_of(
    config: WeightsConfig, nats: np.ndarray, public: np.ndarray | None
) -> tuple[np.ndarray, float | None, float | None]:
    """The weights that the settings ask for, and the constants a and b where there are any."""
    if config.weights in SOUND:
        assert public is not None
        if config.weights == "public-rank":
            return public_rank_weights(nats, public, config.least_weight), None, None
        a, b = public_constants(public)
        return public_weights(nats, a, b, config.least_weight), a, b
    if config.weights == "rank":
        return rank_weights(nats, config.least_weight), None, None
    known = nats[~np.isnan(nats)]
    ends = (float(known.min()), float(known.max())) if len(known) else (None, None)
    return minmax_weights(nats, config.least_weight), *ends


def _weights(shares: np.ndarray, least: float) -> np.ndarray:
    return np.where(np.isnan(shares), UNSCORED, np.clip(shares, least, 1.0))


def _scored(public: np.ndarray) -> np.ndarray:
    known = public[~np.isnan(public)]
    if not len(known):
        raise UsageError(
            "No document of the public corpus has a token that could be scored. Give a public corpus with longer texts."
        )
    return known


# The folder


def read_weights(folder: Path) -> PrivacyWeights:
    """The weights of the prepared corpus in `folder`.

    Holds:
        of_this_text: weights made for other text, or damaged, are a usage error.
    """
    place = Path(folder) / FOLDER
    if not (place / INFO).is_file():
        raise UsageError(f"{folder} has no privacy weights. {_how(folder)}")
    try:
        info = read_json(place / INFO)
        rho, nats = (np.load(checked(place / name)) for name in (RHO, LOG_PERPLEXITIES))
    except (DamagedError, OSError, ValueError, EOFError) as error:
        raise UsageError(f"{place} is damaged. Delete it. {_how(folder)}") from error
    if not isinstance(info, dict) or set(INFO_KEYS) - info.keys() or not _is_usable(rho, nats):
        raise UsageError(f"{place} is damaged or of another version. Delete it. {_how(folder)}")
    text = read_json(Path(folder) / "train" / "info.json")["corpus_fingerprint"]
    num_documents = len(np.load(checked(Path(folder) / "train" / "users.npy"), mmap_mode="r"))
    if info["text_fingerprint"] != text or len(rho) != num_documents:
        raise UsageError(
            f"{place} was made for other text than stands in {folder}/train. Delete it. {_how(folder)}"
        )
    return PrivacyWeights(rho=rho, log_perplexities=nats, info=info)


def _is_usable(rho: np.ndarray, nats: np.ndarray) -> bool:
    shapes = rho.ndim == 1 and rho.shape == nats.shape
    return shapes and rho.dtype == nats.dtype == np.float64 and bool(((rho > 0) & (rho <= 1)).all())


def _how(folder: Path) -> str:
    return (
        f"Run: tightlip prepare CORPUS --out {folder} --privacy-weights --public-model DIR --public-corpus FILE, with the "
        "settings it was prepared with."
    )


def write_weights(
    folder: Path, weights: PrivacyWeights, public: np.ndarray | None, page: str
) -> None:
    """Put weights beside the prepared corpus; those that were there go as the new ones appear.

    Holds:
        whole: killed at any moment, there are the old weights, the new ones, or none.
    """
    place, old = folder / FOLDER, folder / f".{FOLDER}.old"
    shutil.rmtree(old, ignore_errors=True)
    with folder_written_whole(place) as beside:
        np.save(beside / LOG_PERPLEXITIES, weights.log_perplexities)
        np.save(beside / RHO, weights.rho)
        if public is not None:
            np.save(beside / PUBLIC_LOG_PERPLEXITIES, public)
        write_json(beside / INFO, weights.info)
        write_text(beside / PAGE, page)
        if place.exists():
            os.rename(place, old)
    shutil.rmtree(old, ignore_errors=True)
