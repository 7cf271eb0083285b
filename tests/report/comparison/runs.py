"""Runs made up on the spot, for tables and pages that compare them."""

from typing import Any

from tightlip.audit.compared import RunMeasures

SECRETS = ["zanzibar quartz hums", "My ID is 4711", "marble kettle ivy", "My ID is 0815"]
OWNERS = ["Viola", "Orsino", "Olivia", "Feste"]
REAL = "shall I compare thee to a summer's day"
NO_PROMISE = {"standing": "measured only", "epsilon": None, "because": "Nothing was proved."}
PROVED = {
    "standing": "proved",
    "epsilon": 3.14159,
    "delta": 1e-5,
    "unit": "user",
    "because": "It is the mechanism that the theorem speaks of.",
}


def interval(value: float, reach: float = 1.0) -> dict[str, float]:
    return {"value": value, "low": value - reach, "high": value + reach}


def exposures(bits: list[float], *, num_tab: int = 0, space: int = 10**6) -> list[dict[str, Any]]:
    """Two canaries planted once and two planted ten times, and a real one."""
    planted = [
        {
            "text": text, "user": user, "repetitions": times, "kind": "planted", "exact": True,
            "exposure_bits": one, "low": one, "high": one, "tab": place < num_tab,
            "prompt": text.split()[0], "space": space,
        }
        for place, (text, user, times, one) in enumerate(
            zip(SECRETS, OWNERS, [1, 10, 1, 10], bits, strict=True)
        )
    ]  # fmt: skip
    real = {"text": REAL, "user": "Feste", "repetitions": 1, "kind": "real", "tab": False}
    nothing = dict.fromkeys(("exposure_bits", "low", "high"))
    return [*planted, real | nothing | {"prompt": "shall"}]


def repeated(bits: list[float]) -> list[dict[str, Any]]:
    """Canaries that were all planted ten times."""
    (one,) = exposures([0.0, 0.0, 0.0, 0.0])[1:2]
    return [
        one | {"text": f"canary {place}", "exposure_bits": value, "low": value, "high": value}
        for place, value in enumerate(bits)
    ]


def membership(
    area: float, *, reference: float | None = None, ez: float | None = None
) -> dict[str, Any]:
    def score(value: float | None, title: str) -> dict[str, Any] | None:
        figures = {"auc": interval(value or 0, 0.02), "tpr_at_1_percent_fpr": None}
        return value and {"title": title, **figures}

    scores = {
        "loss": score(area, "loss"),
        "reference": score(reference, "reference"),
        "min_k": score(area - 0.01, "min-k%"),
    }
    if ez is not None:  # a record of an earlier version has none
        found = {
            "title": "EZ",
            "auc": interval(ez, 0.02),
            "tpr_at_1_percent_fpr": interval(ez - 0.4, 0.05),
        }
        scores["ez"] = found
    level = {
        "num_members": 40,
        "num_nonmembers": 10,
        "scores": scores | {"zlib": score(0.5, "zlib")},
    }
    return {"documents": level, "users": None, "notes": []}


def measured(name: str = "plain", **changed: Any) -> RunMeasures:
    """A run of which everything is known."""
    settings: dict[str, Any] = {
        "name": name,
        "mitigation": "none",
        "model": "final",
        "train_text": "the same",
        "held_out_text": "the same, too",
        "tokenizer": "words",
        "guarantee": NO_PROMISE,
        "seconds_per_epoch": 10.0,
        "leakage": {
            "leaks": 9, "people_affected": 3, "unique": 25, "users_with_unique": 4,
            "num_users": 12, "leakage_epsilon": 7.5, "validation_perplexity": 150.0,
        },
        "exposures": exposures([1.0, 12.0, 2.0, 13.0], num_tab=2),
        "exposed_above_bits": 6.3,
        "groups": {
            "perplexity": interval(150.0, 9.0), "gap": None, "notes": [],
            "users": [{"user": owner} for owner in OWNERS],
        },
        "membership": membership(0.8),
    }  # fmt: skip
    settings |= changed
    mitigation = settings["mitigation"]
    settings |= {"is_mitigated": mitigation != "none", "is_private": "dp" in mitigation}
    return RunMeasures(**settings)


def with_perplexity(name: str, perplexity: float, **changed: Any) -> RunMeasures:
    """A mitigated run that is so useful."""
    gap = {"perplexity": interval(3.0, 5.0), "log": interval(0.02, 0.03)}
    groups = {"perplexity": interval(perplexity, 9.0), "gap": gap, "users": [], "notes": []}
    return measured(name, **{"mitigation": "triplet", "groups": groups} | changed)
