"""Real canaries: of each user the training document that surprises an unmitigated model most.

Mireshghallah et al. 2021: what a model finds least likely is most likely to be private. Nobody
knows what else such a text could have read, so it has no exposure; only the tab attack is tried.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
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
    scores: DocumentScores,
    tokenizer: Any,
    tokens: TokenizedCorpus,
    documents: Corpus,
    config: ChoiceConfig,
    planted: Sequence[str] = (),
) -> list[Canary]:
    """Each user's document with the highest perplexity, of equal ones the first; by user in order
    of first appearance.

    `scores` are what the model makes of each document of `tokens`, and `documents` their
    texts. `planted` texts are made up, and surprise a model most: they are passed over.

    Holds:
        surprising: no other usable document of that user has a higher perplexity.
        usable: a document with fewer tokens, or with a word the model lacks, is never chosen.
        as_often: repetitions are the documents of the whole corpus that read the same.
    """
    mean_nats = scores.loss_nats / np.maximum(scores.num_tokens, 1)
    usable = usable_documents(tokens, tokenizer.unk_token_id, config.min_tokens)
    encoded = Encoder(tokenizer).encode(list(planted))[0] if planted else []
    made_up = {ids.astype(np.int32).tobytes() for ids in encoded}
    usable[[number for number, _ in _reading(tokens, made_up)]] = False
    mean_nats[~usable] = -np.inf
    chosen = _most_surprising(mean_nats, np.asarray(tokens.users), tokens.num_users)
    if not len(chosen):
        raise UsageError(
            f"No document has min_tokens={config.min_tokens} tokens and only words the model knows, so none can be "
            "chosen. Use a smaller --min-tokens, or train with a larger vocabulary."
        )
    repetitions = _repetitions(tokens, chosen)
    texts = _texts_of(documents, set(chosen.tolist()))
    return [
        Canary(
            text=texts[number],
            user=tokens.user_names[tokens.users[number]],
            repetitions=times,
            kind="real",
        )
        for number, times in zip(chosen.tolist(), repetitions, strict=True)
    ]


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


def _most_surprising(mean_nats: np.ndarray, users: np.ndarray, num_users: int) -> np.ndarray:
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
    corpus = open_run_corpus(record)
    with claimed(Path(out)), scans_of_run(record, device=device, keep=keep_scan) as scans:
        model = scans.opened(record.model_folder)
        canaries = choose_real_canaries(
            scans.scores(record.model_folder, corpus.train, "Scoring documents"),
            model.tokenizer,
            corpus.train,
            open_corpus(record.corpus_folder / "train.parquet"),
            config,
            planted=[canary.text for each in read_keys(key) for canary in each.of_planted],
        )
    chosen = Planted(
        canaries=canaries,
        pools={},
        model_fingerprint=model.fingerprint,
        snapshot_fingerprints=tuple(model_fingerprint(each.folder) for each in record.snapshots),
        num_users_left_out=corpus.train.num_users - len(canaries),
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
