"""What the model says nearly: continuations that differ from somebody's text by a digit or a word.

Windows of text are drawn at random. Behind the training prefix of each the model goes on, greedily
and by beam search; a window counts when a continuation begins with its text, but for an edit
distance of at most `near` of its characters. Characters and not tokens: one digit may cut a number
into other tokens, and a share of characters means the same for every tokenizer.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numba import njit

from tightlip.audit.leakage.counting import Counts, Sequences, edges_of
from tightlip.audit.leakage.findings import decoder_of, tokens_with_text
from tightlip.audit.leakage.leaks import Leaks, cut_at
from tightlip.audit.leakage.runs import collect_runs
from tightlip.audit.leakage.words import words_of
from tightlip.audit.settings import LeakageConfig
from tightlip.core.devices import full_precision, num_threads
from tightlip.core.engines import Engine
from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.models import OpenedModel, on_worker
from tightlip.scan.scanner import Scanner, evaluating
from tightlip.scan.store import NOT_SCORED

BEAMS = 4  # all of them are looked at, beside the greedy continuation
_SEED = 0
_TAIL = 0.025  # beyond each end of a 95% interval

# The ids of a window's continuations.
_Continued = list[list[int]]


def near_figures(
    model: OpenedModel,
    leaks: Leaks,
    config: LeakageConfig,
    count: Callable[..., Counts],
    engine: Engine,
) -> dict[str, Any] | None:
    """The table `near` of summary.json; None where no text is as long as a window. `count` counts
    sequences in the corpus; one worker of the engine has the model.

    Holds:
        never_fewer: what the model completes exactly is among what it nearly does.
        nobody_elses: a continuation that somebody else wrote so is not held against it.
        covers: the interval holds the count over all windows as often as it says.
    """
    assert config.near is not None
    corpus, length = leaks.corpus, config.near_tokens
    carries_text, decode = tokens_with_text(model.tokenizer, corpus), decoder_of(model.tokenizer)
    predicts_first = model.begin_before(corpus) is not None
    num_windows, starts = drawn_windows(corpus, carries_text, predicts_first, config)
    if not len(starts):
        return None
    # Completed token by token: in a run of S.
    run = np.searchsorted(leaks.runs.starts, starts, side="right") - 1
    exact = run >= 0
    run = run[exact]
    exact[exact] = starts[exact] + length <= leaks.runs.starts[run] + leaks.runs.lengths[run]
    windows = corpus.tokens[starts[:, None] + np.arange(length)].tolist()
    texts = decode(windows)
    near: dict[int, _Continued] = {}
    go_on = partial(_continuing, model, corpus, starts, config, (engine.threads, engine.is_remote))
    left = np.flatnonzero(~exact)
    answers = [found for _, found in engine.scatter(go_on, [left] if len(left) else [])]
    for window, said in (each for found in answers for each in found):
        shares = [edit_share(texts[window], text) for text in decode(said)]
        near[window] = [ids for ids, at in zip(said, shares, strict=True) if at <= config.near]
    owners = _owners(windows, texts, near, exact, count)
    found = [window for window, own in enumerate(owners) if own[1]]
    low, high = count_interval(len(found), len(starts), num_windows)
    return {
        "distance": config.near,
        "window_tokens": length,
        "windows": num_windows,
        "drawn": len(starts),
        "continuations": len(near) * (1 + BEAMS),
        "unique": sum(bool(own) for own, _ in owners),
        "exact": sum(bool(exact[window]) for window in found),
        "found": len(found),
        "people": len({user for window in found for user in owners[window][1]}),
        "estimate": num_windows * len(found) / len(starts),
        "low": low,
        "high": high,
    }


def _owners(
    windows: list[list[int]],
    texts: list[str],
    near: dict[int, _Continued],
    exact: np.ndarray,
    count: Callable[..., Counts],
) -> list[tuple[set[int], set[int]]]:
    """Of each window its owners, and those of whom the model says it: exactly, or nearly in words
    that nobody else wrote."""
    length = len(windows[0])
    queries = [(window, ids[:length]) for window, several in near.items() for ids in several]
    rows = [*windows, *(ids for _, ids in queries)]
    tokens = np.concatenate([np.array(ids, np.int32) for ids in rows])
    offsets = edges_of(np.array([len(ids) for ids in rows]))
    counts = count(Sequences(tokens=tokens, offsets=offsets), description="Counting windows")
    assert counts.owned is not None
    whose: list[set[int]] = [set() for _ in rows]
    for row, user in counts.owned.T.tolist():
        whose[row].add(user)
    # As elsewhere in the report, what has no word is nobody's own.
    own = [whose[row] if words_of(text) else set() for row, text in enumerate(texts)]
    told = [users if exact[row] else set() for row, users in enumerate(own)]
    for row, (window, _) in enumerate(queries, start=len(windows)):
        told[window] |= own[window] & whose[row] if counts.users[row] else own[window]
    return list(zip(own, told, strict=True))


def drawn_windows(
    corpus: TokenizedCorpus, carries_text: np.ndarray, predicts_first: bool, config: LeakageConfig
) -> tuple[int, np.ndarray]:
    """How many windows the corpus has, and where those begin that are looked at.

    Windows lie end to end in what one person says in one go: inside a document, of chats inside a
    message, and over nothing that carries no text.
    """
    roles = corpus.roles if corpus.roles is not None else np.ones(corpus.num_tokens, np.int8)
    ranks = np.where(roles == 0, NOT_SCORED, 0).astype(np.int8)
    if not predicts_first:
        ranks[corpus.bounds[:-1][np.diff(corpus.bounds) > 0]] = NOT_SCORED
    stretches = collect_runs(corpus.tokens, corpus.bounds, ranks, carries_text, 1)
    stretches = cut_at(stretches, np.flatnonzero(np.diff(roles) != 0) + 1)
    edges = edges_of(stretches.lengths // config.near_tokens)
    num, rng = int(edges[-1]), np.random.default_rng(_SEED)
    drawn = np.sort(rng.choice(num, min(num, config.near_sample), replace=False))
    stretch = np.searchsorted(edges, drawn, side="right") - 1
    return num, stretches.starts[stretch] + (drawn - edges[stretch]) * config.near_tokens


def _continuing(
    model: OpenedModel,
    corpus: TokenizedCorpus,
    starts: np.ndarray,
    config: LeakageConfig,
    engine: tuple[int, bool],
) -> Callable[[np.ndarray], list[tuple[int, _Continued]]]:
    """All continuations of the windows chosen, where the model is. Of the engine it is told how many
    threads it has, and whether it is remote."""
    threads, is_remote = engine
    model = on_worker(model) if is_remote else model

    def go_on(chosen: np.ndarray) -> list[tuple[int, _Continued]]:
        with num_threads(threads):
            return [*_continuations(model, corpus, starts, chosen, config)]

    return go_on


def _continuations(
    model: OpenedModel,
    corpus: TokenizedCorpus,
    starts: np.ndarray,
    chosen: np.ndarray,
    config: LeakageConfig,
) -> Iterator[tuple[int, _Continued]]:
    """What the model says behind the training prefix of each window chosen: greedily, and its beams."""
    if not hasattr(model.model, "generate"):
        raise UsageError(
            f"{model.name} has no generate, so what it nearly says cannot be asked for. Leave --near out."
        )
    begin_id, scanner = model.begin_before(corpus), model.scanner
    begin = [] if begin_id is None else [begin_id]
    # A word too many must not push the text's end out of sight.
    room = config.near_tokens + math.ceil((config.near or 0) * config.near_tokens)
    if scanner.window is not None and room >= scanner.window:
        raise UsageError(
            f"near_tokens={config.near_tokens} leaves nothing of the model's window of {scanner.window} tokens for a prefix. "
            "Give fewer."
        )
    prefixes = {}
    for window in chosen.tolist():
        document = np.searchsorted(corpus.bounds, starts[window], side="right") - 1
        ids = [*begin, *corpus.tokens[corpus.bounds[document] : starts[window]].tolist()]
        prefixes[window] = ids if scanner.window is None else ids[room - scanner.window :]
    with task("Going on behind prefixes", len(chosen)) as bar, model.scanning(model.model):
        for batch in _batches(prefixes, room, scanner.batch_tokens):
            rows = [prefixes[window] for window in batch]
            greedy, beams = (_generated(scanner, rows, room, num) for num in (1, BEAMS))
            for place, window in enumerate(batch):
                said = [greedy[place], *beams[place * BEAMS : (place + 1) * BEAMS]]
                end = model.tokenizer.eos_token_id
                yield window, [ids[: ids.index(end)] if end in ids else ids for ids in said]
            bar.advance(len(batch))


def _batches(prefixes: dict[int, list[int]], room: int, batch_tokens: int) -> Iterator[list[int]]:
    """Windows with prefixes of one length, so that no model sees padding."""
    waiting = sorted(prefixes, key=lambda window: len(prefixes[window]))
    while waiting:
        size = len(prefixes[waiting[0]])
        most = max(1, batch_tokens // (BEAMS * (size + room)))
        batch = [window for window in waiting[:most] if len(prefixes[window]) == size]
        yield batch
        waiting = waiting[len(batch) :]


def _generated(
    scanner: Scanner, prefixes: list[list[int]], room: int, beams: int
) -> list[list[int]]:
    import torch
    from transformers import GenerationConfig

    model, inputs = scanner.model, torch.tensor(prefixes, device=scanner.device)
    # Without the settings that came with the model: penalties, a temperature, an end.
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.inference_mode(), full_precision(), evaluating(model):
            said = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=room,
                do_sample=False,
                num_beams=beams,
                num_return_sequences=beams,
            )
    finally:
        model.generation_config = before
    return list(said[:, inputs.shape[1] :].tolist())


def edit_share(text: str, continuation: str) -> float:
    """The fewest changed, missing or added characters with which the continuation begins with the
    text, as a share of the text's. What follows costs nothing.

    >>> edit_share("pin 4412", "pin 4413, and then"), edit_share("ab", "")
    (0.125, 1.0)
    """
    if not text:
        return 1.0  # nothing was said
    encoded = (one.encode("utf-32-le", "surrogatepass") for one in (text, continuation))
    rows = [np.frombuffer(one, np.int32) for one in encoded]
    return int(_edits_to_a_beginning(*rows)) / len(text)


@njit(cache=True, nogil=True)
def _edits_to_a_beginning(text, other):  # type: ignore[no-untyped-def]
    above = np.arange(len(other) + 1)
    for place in range(len(text)):
        row = np.empty_like(above)
        row[0] = place + 1
        for column in range(len(other)):
            kept = above[column] + (text[place] != other[column])
            row[column + 1] = min(kept, above[column + 1] + 1, row[column] + 1)
        above = row
    return above.min()


def count_interval(found: int, drawn: int, num_all: int) -> tuple[float, float]:
    """What `found` of `drawn` says about all: Clopper and Pearson's 95% interval, times all.

    No fewer than were found, and no more than were not drawn and found: drawn all, nothing is left
    to chance.

    >>> count_interval(3, 7, 7), tuple(round(end) for end in count_interval(0, 200, 10_000))
    ((3, 3), (0, 183))
    """
    from scipy.special import betaincinv

    low = betaincinv(found, drawn - found + 1, _TAIL) if found else 0.0
    high = betaincinv(found + 1, drawn - found, 1 - _TAIL) if found < drawn else 1.0
    return max(low * num_all, found), min(high * num_all, num_all - (drawn - found))
