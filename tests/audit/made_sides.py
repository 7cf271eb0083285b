"""Members and non-members made up for tests: small corpora and what stand-ins make of them."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from standins import scanned
from tightlip.audit.membership_figures import SCORES
from tightlip.audit.sides import Side
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.document_scores import beside_references, document_scores
from tightlip.scan.scanner import Scanner
from tightlip.scan.store import MOMENTS, PLAIN

VOCABULARY, BOS = 12, 11


def corpus_of(documents, users=None):
    users = list(range(len(documents))) if users is None else users
    return TokenizedCorpus(
        tokens=np.array([token for document in documents for token in document], np.int32),
        bounds=np.cumsum([0, *map(len, documents)]),
        users=np.array(users, np.int32),
        user_names=[f"user {user}" for user in range(max(users, default=-1) + 1)],
        corpus_fingerprint="",
        tokenizer_fingerprint="",
    )


def random_documents(num_documents, seed, *, shortest=0, longest=12):
    draw = random.Random(seed)
    return [
        [draw.randrange(BOS - 1) for _ in range(draw.randint(shortest, longest))]
        for _ in range(num_documents)
    ]


def losses_one_by_one(model, document, bos):
    """Oracle: every token's loss, asked with exactly what stands before it."""
    row = document if bos is None else [bos, *document]
    found = []
    for place in range(1, len(row)):
        logits = model(input_ids=torch.tensor([row[:place]])).logits[0, -1].double()
        found.append(-float(logits.log_softmax(-1)[row[place]]))
    return found


def scan_of(model, scorer=PLAIN, bos=BOS):
    """What a scanner with the model makes of some tokens."""
    scanner = Scanner(model, bos_id=bos)
    return lambda tokens, bounds: scanner.scan(tokens, bounds, scorer)


def scores_by(scan, corpus, **counted):
    with TemporaryDirectory() as folder:
        return document_scores(scanned(scan, corpus, Path(folder)), **counted)


def side_by(scans, corpus, users, *, num_bytes=None, counted=None):
    """A side by scans: that of the model, with moments, and those of references."""
    model, *references = scans
    with TemporaryDirectory() as folder:
        mine = scanned(model, corpus, Path(folder) / "model", MOMENTS)
        theirs = [
            scanned(one, corpus, Path(folder) / str(number))
            for number, one in enumerate(references)
        ]
        return Side(
            users=np.array(users),
            model=document_scores(mine, counted=counted),
            reference=beside_references(mine, theirs, counted=counted) if theirs else None,
            num_bytes=np.diff(corpus.bounds) + 8 if num_bytes is None else num_bytes,
        )


def side_of(model, documents, users, *references):
    scans = [scan_of(model, MOMENTS), *map(scan_of, references)]
    return side_by(scans, corpus_of(documents, users), users)


def scores_of(side):
    return {name: score.values(side) for name, score in SCORES.items()}
