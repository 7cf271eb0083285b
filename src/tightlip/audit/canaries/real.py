"""Real canaries: of each user the training document that surprises an unmitigated model most.

Mireshghallah et al. 2021: what a model finds least likely is most likely to be private. Nobody
knows what else such a text could have read, so it has no exposure; only the tab attack is tried.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.canaries.exposure import Keys, read_keys
from tightlip.audit.settings import ChoiceConfig
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed
from tightlip.core.run_folder import RunRecord, is_run
from tightlip.core.settings import takes
from tightlip.corpus.canaries import Canary, Planted, write_canary_key
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.opening import finished_run, open_run_corpus
from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models.folders import model_fingerprint
from tightlip.scan.document_scores import DocumentScores
from tightlip.scan.scans import scans_of_run


def choose_real_canaries(
    scores: DocumentScores, tokens: TokenizedCorpus, usable: np.ndarray, documents: Corpus
) -> list[Canary]:
    """Each user's document with the highest perplexity, of equal ones the first; by user in order
    of first appearance.

    `scores` are what the model makes of each document of `tokens`, `usable` tells which of them
    may be chosen, and `documents` are their texts.

    Holds:
        surprising: no other usable document of that user has a higher perplexity.
        usable: a document that is too short, or has a word the model lacks, is never chosen.
        as_often: repetitions are the documents of the whole corpus that read the same.
    """
    users = np.asarray(tokens.users)
    mean_nats = np.where(usable, scores.loss_nats / np.maximum(scores.num_tokens, 1), -np.inf)
    chosen = _most_surprising(mean_nats, users)
    texts = _texts_of(documents, set(chosen.tolist()))
    owners = [tokens.user_names[user] for user in users[chosen]]
    rows = zip(chosen.tolist(), owners, _repetitions(tokens, chosen), strict=True)
    return [Canary(text=texts[n], user=who, repetitions=num, kind="real") for n, who, num in rows]


def usable_documents(
    tokens: TokenizedCorpus, unknown_id: int | None, min_tokens: int
) -> np.ndarray:
    """True for each document that is long enough and spelt in words the model knows."""
    bounds = np.asarray(tokens.bounds)
    usable = np.diff(bounds) >= min_tokens
    if unknown_id is not None:
        places = np.flatnonzero(np.asarray(tokens.tokens) == unknown_id)
        usable[np.searchsorted(bounds, places, side="right") - 1] = False
    return usable


def _most_surprising(mean_nats: np.ndarray, users: np.ndarray) -> np.ndarray:
    """Each user's document of the largest value, by number; users without a finite one have none."""
    order = np.lexsort((np.arange(len(users)), -mean_nats, users))
    order = order[np.isfinite(mean_nats[order])]
    _, first = np.unique(users[order], return_index=True)
    return order[first]


def _repetitions(tokens: TokenizedCorpus, chosen: np.ndarray) -> list[int]:
    """How many documents have the very tokens of each chosen one."""
    own = [tokens.document(number).tobytes() for number in chosen]
    counts = Counter(read for _, read in _reading(tokens, set(own)))
    return [counts[each] for each in own]


def _reading(tokens: TokenizedCorpus, wanted: set[bytes]) -> Iterator[tuple[int, bytes]]:
    """The documents whose tokens, as bytes, are among `wanted`."""
    lengths = [len(each) // tokens.tokens.itemsize for each in wanted]
    for number in np.flatnonzero(np.isin(np.diff(tokens.bounds), lengths)).tolist():
        read = tokens.document(number).tobytes()
        if read in wanted:
            yield number, read


def _texts_of(documents: Corpus, numbers: set[int]) -> dict[int, str]:
    texts = chain.from_iterable(batch.texts for batch in documents.batches())
    return {number: text for number, text in enumerate(texts) if number in numbers}


@takes(ChoiceConfig)
def choose_canaries(
    run: str | Path,
    out: str | Path,
    *,
    key: Keys = (),
    device: str = "auto",
    keep_scan: bool = True,
    **settings: Any,
) -> Planted:
    """Write to `out` a key of real canaries: of each user the training document that surprises
    the model of an unmitigated run most.

    `key` names what was planted in the run's corpus, which is then never chosen. The scan is kept
    in the run's `scan/` unless `keep_scan` is False.
    """
    config, record = ChoiceConfig(**settings), _unmitigated(Path(run))
    if Path(out).exists():
        raise UsageError(f"{out} exists. Give another --out, or delete it first.")
    tokens = open_run_corpus(record).train
    with claimed(Path(out)), scans_of_run(record, device=device, keep=keep_scan) as scans:
        model = scans.opened(record.model_folder)
        scores = scans.scores(record.model_folder, tokens, "Scoring documents")
        usable = usable_documents(tokens, model.tokenizer.unk_token_id, config.min_tokens)
        # What was planted is made up, and surprises a model most.
        planted = [canary.text for each in read_keys(key) for canary in each.of_planted]
        encoded = Encoder(model.tokenizer).encode(planted)[0] if planted else []
        made_up = {ids.astype(np.int32).tobytes() for ids in encoded}
        usable[[number for number, _ in _reading(tokens, made_up)]] = False
        documents = open_corpus(record.corpus_folder / "train.parquet")
        if not (canaries := choose_real_canaries(scores, tokens, usable, documents)):
            raise UsageError(
                f"No document has min_tokens={config.min_tokens} tokens and only words the model knows, so none can be "
                "chosen. Use a smaller --min-tokens, or train with a larger vocabulary."
            )
    chosen = Planted(
        canaries=canaries,
        pools={},
        model_fingerprint=model.fingerprint,
        snapshot_fingerprints=tuple(model_fingerprint(each.folder) for each in record.snapshots),
        num_users_left_out=tokens.num_users - len(canaries),
    )
    write_canary_key(Path(out), chosen)
    return chosen


def _unmitigated(run: Path) -> RunRecord:
    if not is_run(run):
        raise UsageError(
            f"{run} is not a tightlip run, and canaries are chosen from the text that a run trained on. Train one: "
            "tightlip train CORPUS --out RUN"
        )
    record = finished_run(run)
    if record.is_mitigated:
        raise UsageError(
            f"{run} was trained with mitigation {record.mitigation!r}, which has a hand in what surprises the model. Choose with "
            "an unmitigated run: tightlip train CORPUS --out RUN --mitigation none"
        )
    return record
