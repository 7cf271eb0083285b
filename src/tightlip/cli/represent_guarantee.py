"""`tightlip represent guarantee`: what noise on a vector is worth, without a model at hand."""

from typing import Annotated, Any

import typer

from tightlip.core.figures import rounded_up


def guarantee(
    dimensions: Annotated[int, typer.Option(help="Coordinates of the vector.")],
    epsilon: Annotated[
        float,
        typer.Option(
            help="For laplace-as-published: per coordinate. Otherwise of the whole vector at --delta."
        ),
    ],
    mechanism: Annotated[
        str, typer.Option(help="laplace-as-published, laplace, or gaussian.")
    ] = "laplace-as-published",
    dropout: Annotated[float, typer.Option(help="The share of words masked at random.")] = 0.0,
    delta: Annotated[
        float, typer.Option(help="The final δ; 0 with laplace is pure differential privacy.")
    ] = 1e-5,
    json_wanted: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON, all of it.")
    ] = False,
) -> None:
    """What one vector gives away: per coordinate, pure, and (ε, δ); and what more of them would."""
    from tightlip.api.represent_vectors import represent_guarantee

    record = represent_guarantee(
        dimensions=dimensions, epsilon=epsilon, mechanism=mechanism, dropout=dropout, delta=delta
    )
    if json_wanted:
        import json

        print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show_guarantee(record, record["releases"])


def show_guarantee(record: dict[str, Any], costs: list[dict[str, Any]]) -> None:
    """Print a record's lines, the texts they hold for, and what several releases cost."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _lines(record, costs):
        # Text, not str: rich would take brackets for its markup.
        table.add_row(name, Text(value))
    Console().print(table)


def _lines(record: dict[str, Any], costs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if record["epsilon"] is None:
        return [("ε", f"none: {record['standing']}"), ("because", record["because"])]
    lines = [("mechanism", _mechanism(record)), *figure_lines(record, record["standings"])]
    lines.append(("holds for", record["adjacency"]))
    if record["dropout"]:
        whole = record["any_two_texts"]
        told = [f"{name} {value}" for name, value in figure_lines(whole)]
        lines.append(("any two texts", "; ".join(told)))
    lines.append(("because", record["because"]))
    lines += [
        ("releases" if not number else "", cost_line(cost)) for number, cost in enumerate(costs)
    ]
    return [*lines, ("outside", "; ".join(record["outside"]))]


def figure_lines(
    figures: dict[str, Any], standings: dict[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Per coordinate, pure and (ε, δ), each with its standing; what there is not is left out."""
    names = {"per_coordinate": "per coordinate", "pure": "pure", "epsilon": "(ε, δ)"}
    lines = []
    for key, name in names.items():
        if figures[key] is None:
            continue
        standing = f" ({standings[key]})" if standings else ""
        at = f" at δ = {figures['delta']:g}" if key == "epsilon" else ""
        lines.append((name, f"ε = {rounded_up(figures[key])}{at}{standing}"))
    return lines


def cost_line(cost: dict[str, Any]) -> str:
    """What so many vectors of one text cost together."""
    number = cost["releases"]
    which = "1 vector of a text" if number == 1 else f"{number:,} vectors of a text"
    return f"{which}: ε = {rounded_up(cost['epsilon'])} at δ = {cost['delta']:g} ({cost['how']})"


def _mechanism(record: dict[str, Any]) -> str:
    letter = "σ" if record["mechanism"] == "gaussian" else "b"
    words = f", {record['dropout']:.0%} of words masked" if record["dropout"] else ""
    return f"{record['mechanism']}, {record['dimensions']} dimensions, {letter} = {record['noise_scale']:.6g}{words}"
