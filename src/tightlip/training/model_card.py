"""The card that lies beside a model's weights: what may be said of them, in words."""

from typing import Any

from tightlip.core.figures import shown_epsilon

_NAMES = ("mechanism", "adjacency", "sampling", "accountant", "steps")
_MORE = ("clip_norm", "sampling_rate", "covers", "outside")
# Of an adaptive run, as `tightlip ledger` has them.
_MODE = ("least_clip", "gamma_floor", "release_noise", "averaging", "least_weight")
_WEIGHTS = ("normalisation", "estimator", "model", "public_corpus")


def model_card(guarantee: dict[str, Any]) -> str:
    """Markdown for the model's README. Nothing measured on private text goes in.

    Holds:
        full_and_least: where noise varies, σ and the least that a step can have are told apart.
    """
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "tags: [tightlip]",
            "---",
            "",
            "# A language model trained by tightlip",
            "",
            *_headline(guarantee),
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in _rows(guarantee)),
            "",
        ]
    )


def _headline(guarantee: dict[str, Any]) -> list[str]:
    lines = [f"**{guarantee['standing'].capitalize()}.** {guarantee['because']}"]
    if guarantee.get("epsilon") is not None:
        proved = guarantee["standing"] == "proved"
        claim = "Differentially private" if proved else "No guarantee, a figure as published"
        lines.insert(
            0,
            f"{claim}: ε = {shown_epsilon(guarantee)} at δ = {guarantee['delta']:g}, per "
            f"{guarantee['unit']} ({guarantee['standing']}).\n",
        )
    if guarantee.get("insecure_seed"):
        lines.insert(0, "**Trained with a known seed: the noise hides nothing. For tests only.**\n")
    return lines


def _rows(guarantee: dict[str, Any]) -> list[tuple[str, Any]]:
    """Everything that says something, each with its name."""
    rows = [(name, guarantee.get(name)) for name in _NAMES]
    rows += [*_noise(guarantee), *((name, guarantee.get(name)) for name in _MORE)]
    return [(name, value) for name, value in rows if value not in (None, [], "")]


def _noise(guarantee: dict[str, Any]) -> list[tuple[str, Any]]:
    """How much noise there was; of an adaptive run the mode too, and where the weights are from."""
    adaptive, least = guarantee.get("adaptive"), guarantee.get("noise_multiplier")
    if not adaptive:
        return [("noise_multiplier", least)]
    noise = [("noise_multiplier", least)]
    if adaptive["mode"] != "clip":
        noise = [
            ("full noise_multiplier", adaptive["noise_multiplier"]),
            ("least noise_multiplier", least),
        ]
    weights = adaptive.get("weights") or {}
    told = ", ".join(str(weights[name]) for name in _WEIGHTS if weights.get(name))
    own = [(name, adaptive.get(name)) for name in _MODE]
    return [("adaptive", adaptive["mode"]), *noise, *own, ("weights", told)]


def _cell(value: Any) -> str:
    words = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words.replace("|", "\\|")
