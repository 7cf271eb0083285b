"""Which leaks remain when an attacker does not know the words that stood before them.

The report shows the model each document as it was trained on. Here every sequence unique by text
is asked for again behind words that somebody could have:

    short      the last few tokens of its training prefix
    start      the first few tokens of its document, whatever stood between them and it
    template   a line with its owner's name
    other      as many tokens from somebody else's text

It remains where all of its tokens are among the top k there too, in one of its places at least. Of a
chat the template's tokens before the first message, the opening, stand before each context.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tightlip.audit.leakage.by_text import ByText
from tightlip.audit.leakage.counting import edges_of, end_to_end
from tightlip.audit.leakage.leaks import Leaks
from tightlip.audit.leakage.runs import Runs, sums_over_runs
from tightlip.audit.settings import CONTEXTS, LeakageConfig
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.store import ScannedCorpus

_SEED = 0  # of whose text stands before a sequence in the context `other`
_DRAWS = 50  # a text may be empty, or of several owners one's own too, and is drawn again
_TOKENS_AT_ONCE = 2_000_000
_HOW = ("short_prefix", "context_template")

Scan = Callable[[TokenizedCorpus, str], ScannedCorpus]


class Prompts(NamedTuple):
    """Numbers of sequences, a place in S of each, and its context: so many tokens of `source` from
    `starts` on."""

    sequences: np.ndarray
    runs: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    source: np.ndarray


def figures_by_context(
    leaks: Leaks, by_text: ByText, config: LeakageConfig, *, scan: Scan, tokenizer: Any
) -> dict[str, Any]:
    """Of summary.json: `contexts`, `leaks_…` of each, and what was typed; null where not asked for.

    Holds:
        brute_force: what remains is what a plain pass over context and sequence completes.
        fewer: nothing remains that did not leak.
        parts: however many prompts are asked at once, the figures are the same.
    """
    asked = [name for name in CONTEXTS[1:] if name in config.contexts]
    table: dict[str, Any] = {}
    if asked:
        table[CONTEXTS[0]] = {**by_text.extent(by_text.unique), "tokens": 1.0}
    for name in asked:
        hits = np.zeros(len(leaks.distinct), dtype=np.int64)
        if name == "template":
            prompts = _behind_names(leaks, by_text, config.context_template, tokenizer)
        else:
            prompts = _behind_text(name, leaks, by_text, config.short_prefix, hits)
        for sequences, found in _hits(prompts, leaks, name, config.top_k, scan):
            np.maximum.at(hits, sequences, found)
        is_known = not by_text.unique.any() or len(prompts.runs) or hits.any()
        table[name] = _figures(leaks, by_text, hits) if is_known else None
    counts = {f"leaks_{name}": (table.get(name) or {}).get("leaks") for name in CONTEXTS[1:]}
    how = {name: getattr(config, name) if asked else None for name in _HOW}
    how |= {"context_template": None} if config.redact else {}  # it may hold a name
    return {"contexts": table or None, **counts, **how}


def _figures(leaks: Leaks, by_text: ByText, hits: np.ndarray) -> dict[str, Any]:
    unique = by_text.unique
    share = hits[unique].sum() / max(leaks.lengths[unique].sum(), 1)
    return {**by_text.extent(unique & (hits == leaks.lengths)), "tokens": float(share)}


def _behind_text(name: str, leaks: Leaks, by_text: ByText, most: int, hits: np.ndarray) -> Prompts:
    """Each place in S behind some tokens of the corpus; where they are the training prefix itself the
    sequence is not asked for, and in `hits` already."""
    corpus, number = leaks.corpus, leaks.distinct.number_of_run
    runs = np.flatnonzero(by_text.unique[number])
    sequences, begins = number[runs], first_spoken(corpus, leaks.runs.documents[runs])
    before = leaks.runs.starts[runs] - begins
    lengths, kept = np.minimum(before, most), before > most
    starts = begins if name == "start" else leaks.runs.starts[runs] - lengths
    if name == "other":
        owner_of = np.zeros(len(leaks.distinct), dtype=np.int64)
        owner_of[by_text.owned[0]] = by_text.owned[1]
        starts, lengths = others_text(corpus, owner_of[sequences], most)
        kept = lengths > 0
    else:
        hits[sequences[~kept]] = leaks.lengths[sequences[~kept]]
    return Prompts(sequences[kept], runs[kept], starts[kept], lengths[kept], corpus.tokens)


def _behind_names(leaks: Leaks, by_text: ByText, template: str, tokenizer: Any) -> Prompts:
    """Each sequence behind the template, once for each of its owners."""
    sequences, owners = by_text.owned
    named, which = np.unique(owners, return_inverse=True)
    names = [leaks.corpus.user_names[user] for user in named]
    ids, _ = Encoder(tokenizer).encode([template.replace("{user}", name) for name in names])
    edges = edges_of(np.array([len(one) for one in ids], dtype=np.int64))
    source = np.concatenate([*ids, np.zeros(0, np.int32)])
    runs = leaks.distinct.first_run[sequences]
    return Prompts(sequences, runs, edges[which], np.diff(edges)[which], source)


def first_spoken(corpus: TokenizedCorpus, documents: np.ndarray) -> np.ndarray:
    """Where the documents' own text begins: of a chat its first message."""
    begins, ends = (np.array(corpus.bounds[documents + more]) for more in (0, 1))
    opens = np.flatnonzero(begins < ends) if corpus.roles is not None else np.zeros(0, np.int64)
    while len(opens):  # a token of all documents at a time, for as long as a template writes
        opens = opens[np.asarray(corpus.roles)[begins[opens]] == 0]
        begins[opens] += 1
        opens = opens[begins[opens] < ends[opens]]
    return begins


def others_text(
    corpus: TokenizedCorpus, users: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each user some tokens of another's text, at most `most`, before a place drawn in it: where
    they begin, and how many; 0 where nobody else wrote any."""
    rng, num_users = np.random.default_rng(_SEED), corpus.num_users
    documents, owners = corpus.owned()
    order, pairs = np.argsort(owners, kind="stable"), documents * num_users + owners
    num_owned = np.bincount(owners, minlength=num_users)
    first = edges_of(num_owned)[:-1]
    sizes = corpus.bounds[1:] - first_spoken(corpus, np.arange(corpus.num_documents))
    drawn = np.zeros(len(users), dtype=np.int64)
    waiting = np.arange(len(users) if num_users > 1 else 0)
    for _ in range(_DRAWS):
        who = rng.integers(0, max(num_users - 1, 1), len(waiting))
        who += who >= users[waiting]
        which = (rng.random(len(waiting)) * num_owned[who]).astype(np.int64)
        drawn[waiting] = documents[order[np.minimum(first[who] + which, len(order) - 1)]]
        is_own = np.isin(drawn[waiting] * num_users + users[waiting], pairs)
        waiting = waiting[is_own | (sizes[drawn[waiting]] == 0)]
    cuts = 1 + (rng.random(len(users)) * sizes[drawn]).astype(np.int64)
    lengths = np.minimum(cuts, most)
    lengths[waiting if num_users > 1 else slice(None)] = 0
    return corpus.bounds[drawn + 1] - sizes[drawn] + cuts - lengths, lengths


def _hits(
    prompts: Prompts, leaks: Leaks, name: str, top_k: int, scan: Scan
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sequences, and how many tokens of each the model completes behind its context, some prompts
    at a time."""
    num_read = edges_of(prompts.lengths + leaks.lengths[prompts.sequences])
    parts = np.flatnonzero(np.diff(num_read[:-1] // _TOKENS_AT_ONCE)) + 1
    for part in np.split(np.arange(len(prompts.runs)), parts) if len(prompts.runs) else ():
        corpus = _as_corpus(prompts, part, leaks, f"{name} {part[0]}")
        scanned = scan(corpus, f"Asking behind other words ({name})")
        own, found = leaks.lengths[prompts.sequences[part]], np.zeros(len(part))
        for shard in scanned.shards():
            here = slice(shard.first, shard.end)
            starts = corpus.bounds[1:][here] - own[here]
            runs = Runs(starts=starts, lengths=own[here], documents=starts)
            is_hit = ((shard.ranks >= 0) & (shard.ranks < top_k)).astype(np.float32)
            found[here] = sums_over_runs(is_hit, runs, int(corpus.bounds[shard.first]))
        yield prompts.sequences[part], found.astype(np.int64)


def _as_corpus(prompts: Prompts, part: np.ndarray, leaks: Leaks, name: str) -> TokenizedCorpus:
    """A document for each prompt: opening, context, sequence."""
    corpus, runs = leaks.corpus, prompts.runs[part]
    documents = leaks.runs.documents[runs]
    opens = np.asarray(corpus.bounds[documents])
    pieces = (
        end_to_end(corpus.tokens, opens, first_spoken(corpus, documents) - opens),
        end_to_end(prompts.source, prompts.starts[part], prompts.lengths[part]),
        end_to_end(corpus.tokens, leaks.runs.starts[runs], leaks.runs.lengths[runs]),
    )
    sizes = np.stack([np.diff(piece.offsets) for piece in pieces])
    bounds = edges_of(sizes.sum(axis=0))
    tokens, begins = np.empty(bounds[-1], dtype=np.int32), bounds[:-1]
    for piece, size in zip(pieces, sizes, strict=True):
        places = np.repeat(begins - piece.offsets[:-1], size) + np.arange(len(piece.tokens))
        tokens[places] = piece.tokens
        begins = begins + size
    return TokenizedCorpus(
        tokens=tokens,
        bounds=bounds,
        users=np.zeros(len(part), dtype=np.int32),
        user_names=[""],
        corpus_fingerprint=f"{corpus.corpus_fingerprint} {name}",
        tokenizer_fingerprint=corpus.tokenizer_fingerprint,
        begins_itself=corpus.begins_itself,
    )
