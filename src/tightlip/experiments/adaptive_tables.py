"""The experiment of adaptive DP as figures: one row a run, the paper's own table beside them.

Rows hold counts and means only: no text, and nobody's name.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tightlip.core import files
from tightlip.core.figures import STANDINGS_WITH_EPSILON, number, rounded_up, standing_words
from tightlip.report.kit.table import NEVER_SAW_BITS, NONE

Row = dict[str, Any]
WAYS = {
    "none": "no DP",
    "dp": "DP",
    "clip": "clip",
    "scale": "scale",
    "as-published": "as published",
}
THIRDS = ("ordinary", "middling", "rare")
# Wu, Gong and Xiong 2022, Table 1: WikiText-103.
PAPER: tuple[Row, ...] = (
    {"model": "No-DP", "loss": 7.08, "perplexity": 256.66, "sigma": None, "epsilon": None},
    {"model": "DP-SGD", "loss": 13.08, "perplexity": 7582.65, "sigma": 1.0, "epsilon": 4.22},
    {"model": "ADP", "loss": 12.65, "perplexity": 4426.05, "sigma": 1.0, "epsilon": 6.35},
    {"model": "DP-SGD", "loss": 17.65, "perplexity": 20815.23, "sigma": 5.0, "epsilon": 0.1},
    {"model": "ADP", "loss": 14.85, "perplexity": 8635.66, "sigma": 5.0, "epsilon": 2.47},
)
PAPER_NOTE = (
    "Their losses and perplexities do not convert into each other, in nats or in bits (e^7.08 is 1,188 and 2^7.08 is 135, "
    "not 257), so only orders and ratios can be compared. Theirs is one text of 100 million words; the accounting behind "
    "their ε is not given. Their Figure 1 has exposures in the order no DP, ADP, DP-SGD, highest first."
)


def result_of(sections: Sequence[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """Everything the command found, with what each third of the text pays beside no DP."""
    return {
        "experiment": "adaptive",
        **facts,
        "corpora": [_with_costs(section) for section in sections],
        "paper": [dict(row) for row in PAPER],
        "ratios": [_ratio(sigma, sections) for sigma in (1.0, 5.0)],
    }


def _with_costs(section: dict[str, Any]) -> dict[str, Any]:
    base = section["rows"][0]
    rows = []
    for row in section["rows"]:
        thirds = [
            {**own, "cost_nats": _difference(own["loss_nats"], plain["loss_nats"])}
            for own, plain in zip(row["thirds"], base["thirds"], strict=True)
        ]
        rows.append({**row, "thirds": thirds})
    return {**section, "rows": rows}


def _ratio(sigma: float, sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity of the adaptive run over that of plain DP at the same σ, theirs and ours."""
    paper = {row["model"]: row["perplexity"] for row in PAPER if row["sigma"] == sigma}
    ours = {}
    for section in sections:
        rows = section["rows"]
        adaptive, plain = (find(rows, way, sigma, "same noise") for way in ("as-published", "dp"))
        if adaptive is not None and plain is not None:
            ours[section["name"]] = adaptive["perplexity"] / plain["perplexity"]
    return {"sigma": sigma, "paper": paper["ADP"] / paper["DP-SGD"], "ours": ours}


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def find(rows: Sequence[Row], mode: str, sigma: float | None, kind: str) -> Row | None:
    """The run of a way; plain DP and `clip` spend the same at the same σ, so they stand for
    themselves where ε is equal."""
    if kind == "equal epsilon" and mode in ("dp", "clip"):
        kind = "same noise"
    chosen = [r for r in rows if (r["mode"], r["sigma"], r["kind"]) == (mode, sigma, kind)]
    return chosen[0] if chosen else None


def groups(section: dict[str, Any]) -> Iterator[tuple[str, str, list[Row]]]:
    """The rows as they are compared: a heading, a kind, and the runs beneath it."""
    rows = section["rows"]
    yield "Without noise", "no noise", [row for row in rows if row["mode"] == "none"]
    for kind in ("same noise", "equal epsilon"):
        for sigma in noise_levels(section):
            known = private_runs(rows, sigma, kind)
            yield _heading(kind, sigma, known), kind, known


def private_runs(rows: Sequence[Row], sigma: float, kind: str) -> list[Row]:
    """The run of each way but that without noise, as far as there are any."""
    runs = [find(rows, mode, sigma, kind) for mode in WAYS if mode != "none"]
    return [row for row in runs if row is not None]


def noise_levels(section: dict[str, Any]) -> list[float]:
    """The σ that plain DP was run with, the least noise first."""
    return sorted({row["sigma"] for row in section["rows"] if row["sigma"] is not None})


def _heading(kind: str, sigma: float, rows: Sequence[Row]) -> str:
    if kind == "same noise":
        return f"Same σ: {sigma:g}"
    return f"Equal ε: {epsilon_words(rows[0])}, that of DP at σ {sigma:g}"


def epsilon_words(row: Row) -> str:
    """ε as it may be printed: rounded up, and only where the standing has one.

    >>> epsilon_words({"standing": "proved", "epsilon": 2.341}), epsilon_words({"standing": "measured only"})
    ('2.35', 'none')
    """
    if row["standing"] not in STANDINGS_WITH_EPSILON or (epsilon := row.get("epsilon")) is None:
        return "none"
    return number(epsilon) if epsilon >= 1000 else rounded_up(epsilon)


def promise_words(row: Row) -> str:
    """δ, unit and standing, to stand beside ε wherever it stands.

    >>> promise_words({"standing": "proved", "epsilon": 2.0, "delta": 1e-05, "unit": "example"})
    'δ 1e-05, per example, proved; arithmetic not recorded'
    """
    if epsilon_words(row) == "none":
        return str(row["standing"])
    return f"δ {row['delta']:g}, per {row['unit']}, {standing_words(row)}"


def repetitions(section: dict[str, Any]) -> list[int]:
    return [entry["repetitions"] for entry in section["rows"][0]["exposure"]]


def csv_text(result: dict[str, Any]) -> str:
    """One line a run."""
    lines = [_csv_line(section, row) for section in result["corpora"] for row in section["rows"]]
    return files.csv_text(lines)


def _csv_line(section: dict[str, Any], row: Row) -> dict[str, Any]:
    plain = (
        *("run", "mode", "kind", "sigma", "noise_multiplier", "epsilon", "delta", "unit"),
        *("standing", "steps", "planned_steps", "stop", "loss_nats", "perplexity"),
    )
    line: dict[str, Any] = {"corpus": section["name"], **{name: row[name] for name in plain}}
    line |= {f"exposure_bits_{e['repetitions']}": e["bits"] for e in row["exposure"]}
    for third in row["thirds"]:
        for name in ("mean_rho", "loss_nats", "cost_nats", "kept_nats"):
            line[f"{name}_{third['third']}"] = third[name]
    for third in row["exposure_by_third"]:
        line[f"exposure_bits_{third['third']}"] = third["mean_bits"]
    return line


def headline(result: dict[str, Any]) -> str:
    """The first corpus' answer: what the weights buy at equal ε."""
    if not (ratios := equal_ratios(result["corpora"][0])):
        return "Adaptive differential privacy beside plain."
    best, way = min((ratio, way) for way, ratio in ratios.items())
    if best > 0.97:
        return "At equal ε, the weights buy no perplexity."
    return f"At equal ε, {way} has {1 - best:.0%} less perplexity than plain DP."


def equal_ratios(section: dict[str, Any], sigma: float | None = None) -> dict[str, float]:
    """Perplexity of the proved ways over plain DP's at the same ε; the largest ε by default."""
    rows = section["rows"]
    sigma = next(iter(noise_levels(section)), None) if sigma is None else sigma
    if (base := find(rows, "dp", sigma, "equal epsilon")) is None:
        return {}
    proved = {mode: find(rows, mode, sigma, "equal epsilon") for mode in ("clip", "scale")}
    return {way: row["perplexity"] / base["perplexity"] for way, row in proved.items() if row}


def findings(section: dict[str, Any]) -> Iterator[str]:
    """What the figures of one corpus say, a sentence or two each."""
    rows = section["rows"]
    for sigma in noise_levels(section):
        plain, published = (find(rows, way, sigma, "same noise") for way in ("dp", "as-published"))
        ratios = equal_ratios(section, sigma)
        if plain is None or published is None or not ratios:
            continue
        others = ", ".join(
            f"{mode} has {ratio:.2f} times that{_cut_short(rows, mode, sigma)}"
            for mode, ratio in ratios.items()
        )
        yield f"At ε {epsilon_words(plain)} ({plain['standing']}) the perplexity of plain DP is {number(plain['perplexity'])}; {others}."
        yield (
            f"As published at σ {sigma:g}: {published['perplexity'] / plain['perplexity']:.2f} times plain DP's perplexity, "
            f"with less noise (ε {epsilon_words(published)} by our reading, against {epsilon_words(plain)}). No theorem covers it."
        )
        if (clip := find(rows, "clip", sigma, "equal epsilon")) is not None:
            yield from _who_pays(plain, clip)
            yield _who_is_protected(rows[0], plain, clip)


def is_cut_short(row: Row) -> bool:
    """Whether the run's privacy budget was spent before its planned steps were taken."""
    return row["stop"] == "privacy budget" and row["steps"] < row["planned_steps"]


def _cut_short(rows: Sequence[Row], mode: str, sigma: float) -> str:
    if (own := find(rows, mode, sigma, "equal epsilon")) is None or not is_cut_short(own):
        return ""
    return f" (it stopped after {own['steps']:,} of {own['planned_steps']:,} steps)"


def stopped_early(section: dict[str, Any]) -> list[str]:
    """A sentence for each run that ended before its last planned step, and why."""
    sentences = []
    for row in filter(is_cut_short, section["rows"]):
        fallen = ""
        if row.get("last_noise_multiplier") and row["noise_multiplier"]:
            share = row["last_noise_multiplier"] / row["noise_multiplier"]
            fallen = f" By then its noise was {share:.0%} of σ, and the less noise a step has, the more it spends."
        sentences.append(
            f"{name_of(row)} stopped after {row['steps']:,} of {row['planned_steps']:,} steps: the next one would have "
            f"passed ε {epsilon_words(row)}, which it promises.{fallen} Its figures are those of a model trained less than the others."
        )
    return sentences


def name_of(row: Row) -> str:
    """A run in words.

    >>> name_of({"mode": "scale", "sigma": 5.0, "kind": "equal epsilon"})
    'scale at the ε of DP at σ 5'
    """
    way = WAYS[row["mode"]]
    if row["sigma"] is None:
        return way
    at = f"σ {row['sigma']:g}"
    return f"{way} at the ε of DP at {at}" if row["kind"] == "equal epsilon" else f"{way}, {at}"


def steps_words(row: Row) -> str:
    """How many steps were taken, and of how many where a budget ended the run.

    >>> steps_words({"steps": 6, "planned_steps": 40, "stop": "privacy budget"})
    '6 of 40'
    """
    if row["steps"] is None:
        return NONE
    return f"{row['steps']:,}" + (f" of {row['planned_steps']:,}" if is_cut_short(row) else "")


def _who_pays(plain: Row, clip: Row) -> Iterator[str]:
    thirds = zip(clip["thirds"], plain["thirds"], strict=True)
    more = [_difference(own["cost_nats"], other["cost_nats"]) for own, other in thirds]
    if None not in more:
        costs = ", ".join(f"{name} {value:+.3f}" for name, value in zip(THIRDS, more, strict=True))
        yield f"What clip costs beyond plain DP at σ {plain['sigma']:g}, in nats a token of held-out text: {costs}."


def _who_is_protected(bare: Row, plain: Row, clip: Row) -> str:
    exposed = []
    for name, row in (("no DP", bare), ("plain DP", plain), ("clip", clip)):
        bits = [third["mean_bits"] for third in row["exposure_by_third"]]
        exposed.append(f"{name} {number(bits[0])} and {number(bits[-1])}")
    return (
        f"Mean bits of canaries after the most ordinary and the rarest public documents at σ {plain['sigma']:g}: "
        f"{'; '.join(exposed)}. A model that never saw them has {NEVER_SAW_BITS} on average."
    )
