"""Privacy weights on one page: the rarest and the most ordinary documents, for a person to judge."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup

from tightlip.core.figures import counted, number, percent
from tightlip.report.kit.plots import Axis, Bar, Plot, draw_bars, linear_axis

NUM_BARS = 20
MOST_CHARACTERS = 320


def spread_of(rho: np.ndarray, nats: np.ndarray, least: float) -> dict[str, Any]:
    """How the weights lie: medians and shares over the documents that could be scored."""
    known = rho[~np.isnan(nats)]
    scored = known if len(known) else np.ones(1)  # what cannot be scored weighs 1
    return {
        "num_documents": len(rho),
        "num_unscored": len(rho) - len(known),
        "median": float(np.median(scored)),
        "mean": float(scored.mean()),
        "at_least": float((scored <= least).mean()),
        "at_one": float((scored >= 1).mean()),
    }


def doubts(info: dict[str, Any], spread: dict[str, Any]) -> Iterator[str]:
    """What speaks against these weights, in sentences."""
    if spread["at_one"] > 0.5:
        yield (
            f"{percent(spread['at_one'])} of the documents weigh 1, so the weights tell little apart. To this estimator most "
            "of the corpus is rarer than the public corpus: take one of a more similar kind, or another model."
        )
    if spread["at_least"] > 0.5:
        why = "A few documents of enormous perplexity take up the whole range."
        if info["is_sound"]:
            why = "Most of the corpus is more ordinary than the public corpus, or the model has seen it."
        yield f"{percent(spread['at_least'])} of the documents have the least weight. {why}"
    if info["estimator"] == "frequency estimate":
        yield (
            "These weights come from a frequency estimate, no language model: how often words and pairs of words stand in "
            "the public corpus."
        )


def lines_about(info: dict[str, Any], rho: np.ndarray, nats: np.ndarray) -> list[str]:
    """The weights in two or three lines for the terminal."""
    spread = spread_of(rho, nats, info["least_weight"])
    against = f" against {info['public_corpus']}" if info["public_corpus"] else ""
    made = f"Weighed {counted(spread['num_documents'], 'document')} by {info['model']}{against} ({info['normalisation']}): "
    lies = (
        f"median {number(spread['median'])}, {percent(spread['at_one'])} at 1, {percent(spread['at_least'])} at "
        f"{info['least_weight']:g}."
    )
    return [made + lies, *doubts(info, spread)]


@dataclass(frozen=True, kw_only=True)
class WeightsPage:
    """The page of a corpus' privacy weights; `shown` has the highest- and the lowest-weighted
    documents.

    Holds:
        short: of each document at most `MOST_CHARACTERS` are shown.
    """

    files: ClassVar[str] = "report/weights/page"
    info: dict[str, Any]
    rho: np.ndarray
    nats: np.ndarray
    public: np.ndarray | None
    shown: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]

    def content(self) -> dict[str, Any]:
        info, public = self.info, self.public
        spread = spread_of(self.rho, self.nats, info["least_weight"])
        half = f"Half of the {counted(spread['num_documents'], 'document')} weigh"
        highest, lowest = ([*map(_shown, end)] for end in self.shown)
        return {
            "headline": f"{half} {number(spread['median'])} or less",
            "version": info["version"],
            "info": info,
            "doubts": list(doubts(info, spread)),
            "spread": spread,
            "weight_plot": weight_plot(self.rho[~np.isnan(self.nats)]),
            "perplexity_plot": perplexity_plot(self.nats, info),
            "scored": _scored(info),
            "highest": highest,
            "lowest": lowest,
            "most_characters": MOST_CHARACTERS,
            "num_public": None if public is None else int((~np.isnan(public)).sum()),
        }


def _shown(document: dict[str, Any]) -> dict[str, Any]:
    with np.errstate(over="ignore"):
        perplexity = number(np.exp(document["nats"]))
    return document | {"perplexity": perplexity, "text": " ".join(document["text"].split())}


def _scored(info: dict[str, Any]) -> str:
    """What has a probability of its own."""
    return "word" if info["estimator"] == "frequency estimate" else "token"


def weight_plot(rho: np.ndarray) -> Markup:
    """Documents by weight."""
    plot = Plot(title="Documents by weight", description="Bars count documents.")
    edges = np.linspace(0, 1, NUM_BARS + 1)
    counts, _ = np.histogram(rho, edges)
    draw_bars(plot, [*_bars(edges, edges, counts, "weight")], "documents")
    plot.x_axis(linear_axis(1.0), "weight ρ (the further right, the rarer)")
    return plot.svg()


def perplexity_plot(nats: np.ndarray, info: dict[str, Any]) -> Markup | None:
    """Documents by log-perplexity, with a and b where there are any."""
    known = nats[~np.isnan(nats)]
    if not len(known):
        return None
    plot = Plot(title="Documents by log-perplexity", description="Bars count documents.")
    # The odd outlier would squeeze everything else into one bar: it is counted in the last.
    low, high = np.quantile(known, (0.005, 0.995))
    marks = [info[name] for name in ("a", "b") if info[name] is not None]
    low, high = min([low, *marks]) - 0.05, max([high, *marks]) + 0.05
    edges = np.linspace(low, high, NUM_BARS + 1)
    counts, _ = np.histogram(np.clip(known, low, high), edges)
    shares = (edges - low) / (high - low)
    draw_bars(plot, [*_bars(shares, edges, counts, "log-perplexity")], "documents")
    axis = Axis(low=low, high=high, ticks=linear_axis(high, low=low).ticks)
    inside = [tick for tick in axis.ticks if low <= tick[0] <= high]
    plot.x_axis(replace(axis, ticks=inside), f"nats a {_scored(info)}")
    for name, place in zip(("a", "b"), marks, strict=False):
        plot.mark_x(axis.at(place), f"{name} = {place:.2f}")
    return plot.svg()


def _bars(places: np.ndarray, edges: np.ndarray, counts: np.ndarray, what: str) -> Iterator[Bar]:
    for i, n in enumerate(counts.tolist()):
        tip = f"{what} {edges[i]:.2f} to {edges[i + 1]:.2f}: {counted(n, 'document')}"
        left, right = places[i : i + 2].tolist()
        yield Bar(left=left, right=right, count=n, own=n, tip=tip)
