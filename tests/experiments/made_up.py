"""Made-up results of the papers' experiments, as `tightlip reproduce` writes them."""

from tightlip.experiments.adaptive_tables import result_of

THIRDS = ("ordinary", "middling", "rare")
PERPLEXITY = {"none": 120.0, "dp": 500.0, "clip": 550.0, "scale": 700.0, "as-published": 450.0}


# Adaptive DP


def row(mode, sigma=None, kind="same noise"):
    """A run whose losses are level over thirds but for rare text, which pays 0.1 nats more."""
    private = mode != "none"
    return {
        "run": f"{mode}-{sigma}-{kind}",
        "mode": mode,
        "kind": kind if private else "no noise",
        "sigma": sigma,
        "noise_multiplier": sigma,
        "epsilon": 2.0 / sigma if private else None,
        "delta": 1e-5 if private else None,
        "unit": "example" if private else None,
        "standing": "as published" if mode == "as-published" else "proved" if private else "measured only",
        "because": "Because.",
        "accountant": "PLD",
        "steps": 40,
        "planned_steps": 40,
        "stop": "steps",
        "last_noise_multiplier": None,
        "loss_nats": 6.0,
        "perplexity": PERPLEXITY[mode],
        "exposure": [{"repetitions": n, "bits": b} for n, b in ((10, 1.0), (100, 3.0), (1000, 19.9))],
        "thirds": [
            {"third": name, "mean_rho": rho, "num_documents": 90, "loss_nats": 5 + private + cost, "seen_loss_nats": 5.0, "kept_nats": 0.1}
            for name, rho, cost in zip(THIRDS, (0.2, 0.5, 0.9), (0, 0, 0.1 * (mode == "clip")), strict=True)
        ],
        "exposure_by_third": [
            {"third": name, "mean_rho": 0.5, "num_canaries": 12, "mean_bits": 2.0} for name in THIRDS
        ],
    }  # fmt: skip


def adaptive_result():
    """One corpus, every way at two noise multipliers."""
    rows = [row("none")]
    rows += [row(mode, s) for s in (1.0, 5.0) for mode in ("dp", "clip", "scale", "as-published")]
    rows += [
        row(mode, s, "equal epsilon") for s in (1.0, 5.0) for mode in ("scale", "as-published")
    ]
    about = {"unit": "example", "num_documents": 4000, "num_users": 170, "num_units": 4000}
    section = {
        "name": "plays",
        **about,
        "mean_weight": 0.7,
        "mean_minmax_weight": 0.3,
        "rows": rows,
    }
    facts = {"scale": "smoke", "public_model": "an LSTM", "public_corpus": "others", "version": "0"}
    facts |= {"machine": "torch on the CPU"}
    return result_of([section], **facts)


# Private vectors


def over_seeds(mean):
    return {"mean": mean, "spread": 0.012}


def way(name, epsilon=None, dropout=0.0):
    """A way of training; the smaller its ε, the less of everything is read."""
    noisy = epsilon is not None
    read = {"accuracy": {"absent": over_seeds(0.8), "present": over_seeds(0.7)}, "p": 0.04}
    return {
        "way": name,
        "run": f"{name}-{epsilon}-{dropout}",
        "epsilon": epsilon,
        "dropout": dropout,
        "guarantee": {
            "epsilon": 8 * epsilon if noisy else None,
            "delta": 1e-5,
            "standing": "proved" if noisy else "measured only",
            "adjacency": "any two texts",
            "dropout": dropout,
            "any_two_texts": {"epsilon": 9.5 * epsilon} if noisy else None,
        },
        "main": over_seeds(0.79),
        "main_unseen": over_seeds(0.77),
        "privacy": {"mlp": over_seeds(0.4), "strongest": over_seeds(0.35)},
        "strongest": {"logistic": 3, "mlp": 1},
        "attributes": {
            entity: {"absent": over_seeds(0.9), "present": over_seeds(0.3)}
            for entity in ("entity_3", "entity_4")
        },
        "groups": dict.fromkeys(("entity_3", "entity_4"), read),
    }


def vectors_result():
    """The paper's news corpus, every way that its tables have."""
    section = {
        "name": "ag",
        "about": "News with people's names.",
        "kind": "entities",
        "paper": "AG",
        "label": "topic",
        "private": ["entity_3", "entity_4"],
        "num_train": 4000,
        "num_test": 1000,
        "num_test_users": None,
        "num_seen_in_train": 12,
        "dimensions": 64,
        "majority": {"main": over_seeds(0.5), "privacy": {"mlp": over_seeds(0.6)}},
        "rows": [
            way("none"),
            way("adversarial"),
            *(way("dpnr", epsilon) for epsilon in (0.05, 0.5, 1.0)),
            *(way("dpnr", 1.0, dropout) for dropout in (0.1, 0.5)),
            way("laplace", 8.0),
            way("gaussian", 8.0),
        ],
    }
    facts = {"scale": "smoke", "num_seeds": 2, "extractor": "bag", "version": "0"}
    return {"experiment": "representation", **facts, "corpora": [section]}
