"""Made-up results of attacks, as `tightlip represent attack` writes them."""

import math
import random

WHO = ("mlp", "logistic", "averaged", "trees", "strongest", "bare")


def figure(value, half=0.03):
    return {"value": value, "low": max(0.0, value - half), "high": min(1.0, value + half)}


def signed(value, half=0.03):
    return {"value": value, "low": value - half, "high": value + half}


def attacked(accuracy, majority, views):
    above = signed(accuracy - majority)
    found = {
        "accuracy": figure(accuracy),
        "above_majority": above,
        "auc": figure(0.5 + accuracy / 3),
    }
    return {view: {**found, "chosen": {}} for view in views}


def attribute(accuracies, majority, values=("female", "male"), views=("all",), **others):
    return {
        "values": list(values),
        "names_people": False,
        "strongest": "logistic",
        "majority": {view: figure(majority) for view in views},
        "attackers": {name: attacked(one, majority, views) for name, one in accuracies.items()},
        **others,
    }


def fairness(p=0.4, values=("female", "male")):
    groups = {value: figure(0.8 - 0.1 * place) | {"num_rows": 300 - place, "num_users": 40} for place, value in enumerate(values)}  # fmt: skip
    return {"groups": groups, "gap": signed(0.1), "p": p, "test": "users swap groups at random"}


def picture(names, num=60, seed=0):
    draw = random.Random(seed)
    places = lambda: [[round(draw.random(), 3), round(draw.random(), 3)] for _ in range(num)]  # noqa: E731
    codes = {name: [draw.randrange(-1, 2) for _ in range(num)] for name in names}
    return {"num_points": num, "before": places(), "after": places(), "codes": codes}


def entities(views=("all",)):
    one = {view: {"one_minus_f": figure(0.9), "one_minus_f_tuned": figure(0.5), "threshold": 0.2} for view in views}  # fmt: skip
    each = [{"accuracy": figure(0.8), "above_majority": signed(0.0), "auc": figure(0.7)}] * 2
    return {
        "names": ["Ann Private", "Bob Secret"],
        "found_by": "a list",
        "num_left_out": 1,
        "shares": [0.2, 0.1],
        "majority": {view: figure(1.0) for view in views},
        "everywhere": {view: figure(0.74) for view in views},
        "attackers": dict.fromkeys(WHO, one),
        "each": {"strongest": each, "bare": each},
    }


def result(
    name, *, epsilon=4.0, dropout=0.0, leak=0.1, method="dpnr", mechanism="gaussian", **others
):
    """A run whose attackers are `leak` above the majority on gender, and at it on age."""
    views = others.pop("views", ("all",))
    noisy = method == "dpnr"
    who = {"mlp": 0.6 + leak / 2, "logistic": 0.6 + leak, "averaged": 0.62 + leak, "trees": 0.6, "strongest": 0.6 + leak, "bare": 0.95}  # fmt: skip
    level = {**dict.fromkeys(who, 0.55), "bare": 0.7}
    attributes = {"gender": attribute(who, 0.6, views=views), "age": attribute(level, 0.55, ("..19", "30.."), views)}  # fmt: skip
    record = {
        "mechanism": mechanism if noisy else "none",
        "epsilon": epsilon if noisy else None,
        "delta": 1e-5 if noisy else None,
        "per_coordinate": 0.05 if mechanism.startswith("laplace") and noisy else None,
        "standings": {"per_coordinate": "as published" if mechanism.endswith("published") else None},
        "standing": "proved" if noisy else "measured only",
        "because": "Because it was calibrated.",
        "adjacency": "any two texts" if noisy else None,
    }  # fmt: skip
    privacy = {
        one: {view: figure(1 - (who[one] + level[one]) / 2) for view in views} for one in who
    }
    made = {
        "run": name,
        "group": None,
        "method": method,
        "mechanism": record["mechanism"],
        "epsilon": epsilon if noisy else None,
        "dropout": dropout,
        "dimensions": 64,
        "extractor": "bag",
        "label": "play",
        "guarantee": record,
        "releases": {"num": 16, "epsilon": 5 * epsilon, "delta": 1e-5, "how": "composed"} if noisy else None,
        "intervals": "95%",
        "num_test": 700,
        "num_test_users": 175,
        "num_seen_in_train": 0 if views == ("all",) else 9,
        "has_users": True,
        "main": {view: figure(0.8 - 0.2 / math.log2(2 + epsilon)) for view in views},
        "main_majority": {view: figure(0.3) for view in views},
        "attributes": attributes,
        "privacy": {"majority": {view: figure(0.425) for view in views}, **privacy},
        "entities": None,
        "fairness": {"gender": fairness(), "age": fairness(0.001, ("..19", "30.."))},
        "picture": picture(attributes),
        "notes": [],
    }  # fmt: skip
    return {**made, **others}
