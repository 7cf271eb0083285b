"""For every registered page something to show, with secrets in it, and the page taken apart."""

import json
import math
from dataclasses import asdict
from html.parser import HTMLParser

import numpy as np

from experiments.made_up import adaptive_result, vectors_result
from report.comparison.runs import OWNERS, SECRETS, exposures, measured, membership, with_perplexity
from report.leakage.folders import PEOPLE, redacted, sample_rows, sample_snapshots, write_folder
from report.vectors.results import entities, result
from tightlip.audit.compared import Matching, compared
from tightlip.commands import audit_text

ENTITIES = ("Ann Private", "Bob Secret")
TEXT = "quintessence of dust"


def leakage(folder):
    """A redacted report: numbers in place of people, no text."""
    rows = redacted(sample_rows(120, seed=7))
    names = sorted({row["owner"] for row in rows if row["owner"]})
    write_folder(folder, rows, people=names, snapshots=sample_snapshots(5), redacted=True)
    return {"folder": folder}


def comparison(folder):
    hidden = membership(0.6) | {"not_counted": {"num_documents": 233, "num_tokens": 4800}}
    runs = [
        measured("plain"),
        with_perplexity("adversarial", 151, exposures=exposures([1, 5, 2, 6])),
        with_perplexity("triplet", 149, exposures=exposures([1, 5.1, 2, 6.1]), membership=hidden),
        with_perplexity("a-run-with-a-very-long-name-indeed/of-its-own", 700),
        with_perplexity("dp", 152, tokenizer="bpe"),
    ]
    matching = Matching()
    rows = compared(runs, matching)
    return {"rows": rows, **asdict(matching), "notes": ["110 users are few."]}


def attacked_runs():
    return [
        result("bare", method="none", leak=0.3, entities=entities()),
        result("at-40", epsilon=40.0, leak=0.2, entities=entities()),
        result("at-4", epsilon=4.0, leak=0.1, entities=entities()),
        result("a-run-with-a-very-long-name-of-its-own", epsilon=0.4, leak=0.0, entities=entities()),
        result("masked", epsilon=4.0, dropout=0.5, leak=0.05, entities=entities()),
        result("published", mechanism="laplace-as-published", epsilon=6.34, entities=entities()),
    ]  # fmt: skip


INFO = {
    "normalisation": "public",
    "is_sound": True,
    "estimator": "language model",
    "model": "some-model",
    "model_fingerprint": "f" * 64,
    "public_corpus": "public.parquet",
    "public_corpus_fingerprint": "e" * 64,
    "a": 3.0,
    "b": 6.0,
    "least_weight": 0.05,
    "text_fingerprint": "d" * 64,
    "version": "0.1.0",
}
NATS = np.append(np.random.default_rng(0).normal(4.5, 0.8, 499), math.nan)
RHO = np.where(np.isnan(NATS), 1.0, np.clip((NATS - 3) / 3, 0.05, 1))
NASTY = "</td><script>document.title='owned'</script> \u202eevil שלום " + "word " * 200


def weighed(num=20, text=NASTY):
    return [
        {"number": n, "user": f"<b>u{n}</b>", "text": text, "rho": 1 - n / 100, "nats": 9.0}
        for n in range(num)
    ]


def weights(folder):
    ends = (weighed(text=f"{TEXT} {NASTY}"), weighed(3))
    return {"info": INFO, "rho": RHO, "nats": NATS, "public": np.arange(120.0), "shown": ends}


def extraction(folder):
    """A redacted report on a model that knows one of its people by heart."""
    import random

    import tightlip
    from animals import WORDS
    from standins import Parrot
    from tightlip.corpus.readers import open_corpus
    from tightlip.corpus.vocabulary import build_tokenizer

    draw, tokenizer = random.Random(0), build_tokenizer(open_corpus([("a", " ".join(WORDS))]))
    rows = [(PEOPLE[n % len(PEOPLE)], " ".join(draw.choices(WORDS, k=30))) for n in range(20)]
    model = Parrot(len(tokenizer), [tokenizer(text)["input_ids"] for _, text in rows[:3]])
    settings = {"lengths": (5, 10, 20), "begin": "never", "redact": True, "held_out": rows[:4]}
    tightlip.extract(model, rows, tokenizer=tokenizer, out=folder, device="cpu", **settings)
    return {"folder": folder}


def synthetic(folder):
    """A redacted report of a text that repeats some of what people wrote."""
    words = [f"word{number}" for number in range(40)]
    people = [(name, " ".join([TEXT, name, *words[n : n + 20]])) for n, name in enumerate(PEOPLE)]
    others = [(f"other {name}", text.upper()[20:] + " else") for name, text in people[:3]]
    text = [" ".join(text.split()[:14]) for _, text in people] + ["nothing of anybody's"]
    audit_text(
        text, people, control=others, out=folder, redact=True, min_words=6, num_bootstraps=100
    )
    return {"folder": folder}


SAMPLES = {
    "adaptive-paper": lambda folder: {"result": adaptive_result()},
    "comparison": comparison,
    "extraction": extraction,
    "leakage": leakage,
    "synthetic": synthetic,
    "vectors": lambda folder: {"results": attacked_runs(), "version": "0.1.0"},
    "vectors-paper": lambda folder: {"result": vectors_result()},
    "weights": weights,
}
# The one page that is for those who may read the text, and says so.
SHOWS_TEXT = {"weights"}
# What no page may hold unless it shows text: whole sequences, canaries, people.
HIDDEN = {
    *(row["sequence"].strip() for row in sample_rows(120, seed=7) if len(row["sequence"]) > 12),
    *PEOPLE, *SECRETS, *OWNERS, *ENTITIES, TEXT,
}  # fmt: skip


class Reader(HTMLParser):
    """Takes a page apart as a browser would: its elements, its data, its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.visible = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = (
            f"{tag} {dict(attrs).get('id', '')}".strip() if tag in ("script", "style") else ""
        )

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside:
            self.blocks[self._inside] = self.blocks.get(self._inside, "") + data
        else:
            self.visible += data

    @property
    def data(self):
        return json.loads(self.blocks["script data"])


def contrast(first: str, second: str) -> float:
    """WCAG's contrast ratio of two rgb() colours."""
    lights = []
    for colour in (first, second):
        channels = [
            int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")
        ]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
        )
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(lights) / min(lights)
