"""The card that lies beside a model's weights: what may be said of them, in words."""

from typing import Any

from tightlip.core.figures import rounded_up


def model_card(guarantee: dict[str, Any]) -> str:
    """Markdown for the model's README. Nothing measured on private text goes in."""
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
            *(f"| {name} | {_cell(guarantee.get(name))} |" for name in _shown(guarantee)),
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
            f"{claim}: ε = {rounded_up(guarantee['epsilon'])} at δ = {guarantee['delta']:g}, per "
            f"{guarantee['unit']} ({guarantee['standing']}).\n",
        )
    if guarantee.get("insecure_seed"):
        lines.insert(0, "**Trained with a known seed: the noise hides nothing. For tests only.**\n")
    return lines


def _shown(guarantee: dict[str, Any]) -> list[str]:
    names = ("mechanism", "adjacency", "sampling", "accountant", "steps", "noise_multiplier")
    more = ("clip_norm", "sampling_rate", "covers", "outside")
    return [name for name in (*names, *more) if guarantee.get(name) not in (None, [], "")]


def _cell(value: Any) -> str:
    words = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words.replace("|", "\\|")
