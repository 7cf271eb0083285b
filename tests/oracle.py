"""The leakage report by brute force: one model call per prefix, naive matching of id lists."""

import math
from collections import defaultdict

import torch


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double(), dim=-1)


def predictions(model, ids, bos):
    """(rank, log-probability) of each token of one document, None where it is not predicted."""
    found = []
    for position, token in enumerate(ids):
        prefix = ([bos] if bos is not None else []) + ids[:position]
        if not prefix:
            found.append(None)
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prefix])).logits[0, -1].float()
        rank = int((logits > logits[token]).sum())
        found.append((rank, float(log_softmax(logits)[token])))
    return found


def predictions_at_once(model, ids, bos):
    """The same of one call for the whole document."""
    shown = ([bos] if bos is not None else []) + ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([shown])).logits[0].float()
    found = [
        (int((row > row[token]).sum()), float(log_softmax(row)[token]))
        for row, token in zip(logits, shown[1:], strict=False)
    ]
    return found if bos is not None else [None, *found]


def collect(model, documents, bos, textless, top_k, *, unspoken=(), breaks=(), predict=predictions):
    """S as (user, document, start, ids, perplexity), the last run of a document flushed.

    `unspoken` are the (document, position) of what no message says, and at `breaks` another
    speaks than before.
    """
    entries = []
    for number, (user, ids) in enumerate(documents):
        run, logs, start = [], [], 0
        for position, (token, answer) in enumerate(zip(ids, predict(model, ids, bos), strict=True)):
            if run and (number, position) in breaks:
                entries.append((user, number, start, run, math.exp(-sum(logs) / len(logs))))
                run, logs = [], []
            is_hit = answer is not None and answer[0] < top_k and token not in textless
            if is_hit and (number, position) not in unspoken:
                if not run:
                    start = position
                run.append(token)
                logs.append(answer[1])
            elif run:
                entries.append((user, number, start, run, math.exp(-sum(logs) / len(logs))))
                run, logs = [], []
        if run:
            entries.append((user, number, start, run, math.exp(-sum(logs) / len(logs))))
    return entries


def occurrences(needle, hay):
    return sum(hay[i : i + len(needle)] == needle for i in range(len(hay) - len(needle) + 1))


def features(model, documents, bos, textless, top_k):
    """token ids -> the six features and `copied`, as the report defines them."""
    return features_of(collect(model, documents, bos, textless, top_k), documents)


def features_of(entries, documents):
    """The features of what `collect` found."""
    grouped = defaultdict(list)
    for entry in entries:
        grouped[tuple(entry[3])].append(entry)
    report = {}
    for ids, entries in grouped.items():
        needle = list(ids)
        counts = [(user, occurrences(needle, hay)) for user, hay in documents]
        entries = sorted(entries, key=lambda e: (round(e[4], 9), e[1], e[2]))
        report[ids] = {
            "total_in_s": len(entries),
            "users_in_s": len({e[0] for e in entries}),
            "total_in_d": sum(count for _, count in counts),
            "users_in_d": len({user for user, count in counts if count}),
            "contexts": [documents[e[1]][1][: e[2]] for e in entries],
            "perplexities": [e[4] for e in entries],
            "copied": all(occurrences(needle, documents[e[1]][1][: e[2]]) for e in entries),
        }
    return report
