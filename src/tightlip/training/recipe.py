"""A run before it starts: its text as rows, its settings resolved, all of it checked.

Where the one-run check is asked for, canaries stand behind the rows: random documents, each
trained on or not by a fair coin. Whatever they read, nobody's text decides on it: they are trained
on, and words chosen because the corpus lacks them would tell what it has.
"""

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tightlip import __version__
from tightlip.core.errors import UsageError
from tightlip.core.randomness import keyed_generator
from tightlip.core.run_folder import DP_CHECK
from tightlip.corpus.canaries import CheckKey, read_check_key, write_check_key
from tightlip.corpus.history import sources_of
from tightlip.corpus.opening import fingerprints
from tightlip.corpus.prepare import PreparedCorpus, corpus_id, registered_people
from tightlip.corpus.privacy_weights import read_weights
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models.loading import load_tokenizer, read_configuration
from tightlip.training.batches import Rows, rows_of
from tightlip.training.config import BUILT_IN_MODELS, RunOptions, TrainConfig
from tightlip.training.mitigations import CorpusFacts
from tightlip.training.starting import check_start, starting_model

CANARY_LENGTH = 16  # tokens; long enough to stand out, short enough for any row

# A run goes on, or counts as done, where these agree; a corpus may have moved.
SAME_RUN: dict[str, tuple[str, ...]] = {"train": (), "corpus": ("folder",), "start": ()}
CHECK_KINDS = ("random", "rare", "new", "sampled")
TEMPERATURE = 2.0  # high: what the model would hardly ever say by itself
_RARE_SHARE, _FEWEST = 0.1, 50
_AT_ONCE = 256
Draw = Callable[[tuple[int, int], np.random.Generator], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained on what. `tree` is the resolved configuration kept with the run."""

    config: TrainConfig
    options: RunOptions
    rows: Rows
    validation: Rows | None
    tokenizer: Any
    corpus: CorpusFacts
    tree: dict[str, Any]

    @property
    def private_figures(self) -> tuple[str, ...]:
        """How names of metrics begin that no guarantee covers. Seconds tell how much text was drawn,
        and frequencies are those of the text trained on."""
        if not self.config.mitigation.is_private:
            return ()
        if self.corpus.validation_is_public:
            return ("train_", "seconds", "validation_perplexity_by_frequency")
        return ("train_", "seconds", "validation_")


def recipe_for(
    corpus: PreparedCorpus,
    out: Path,
    config: TrainConfig,
    options: RunOptions,
    without_users: frozenset[int],
) -> Recipe:
    """Everything the loop needs, or a usage error before any work is done."""
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    rows = _rows(corpus.train, config, tokenizer, without_users)
    _check_rows(rows, corpus, without_users)
    held = corpus.validation
    validation = None if held is None else _rows(held, config, tokenizer, frozenset())
    if validation is None or not len(validation):
        validation = None
        _check_needs_no_validation(corpus, config)
    facts = _facts(corpus, config)
    if without_users:  # for an audit of its owner's, as private as the report that it serves
        facts = replace(facts, people=())
    return Recipe(
        config=config,
        options=options,
        rows=rows,
        validation=validation,
        tokenizer=tokenizer,
        corpus=facts,
        tree={
            "train": _train_tree(config),
            "corpus": _corpus_tree(corpus, out, rows, without_users) | _weights_tree(facts),
            "start": check_start(config, tokenizer, corpus.folder),
            "options": options.tree(),
            "prepare": corpus.settings,
            "versions": {"tightlip": __version__}
            | {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
    )


def with_canaries(recipe: Recipe, out: Path) -> Recipe:
    """The recipe with the canaries that the one-run check asks for, their key in `out`."""
    config, tokenizer = recipe.config, recipe.tokenizer
    if not (num_canaries := config.mitigation.num_check_canaries):
        return recipe
    kind = getattr(config.mitigation, "dp_check_kind", "random")
    draw, length = drawn_tokens(kind, config, tokenizer), min(CANARY_LENGTH, config.sequence_length)
    rows = plant(recipe.rows, num_canaries, length=length, key_file=out / DP_CHECK, draw=draw)
    return replace(recipe, rows=rows)


def _facts(corpus: PreparedCorpus, config: TrainConfig) -> CorpusFacts:
    is_private = config.mitigation.is_private
    return CorpusFacts(
        text_fingerprint=corpus.train.corpus_fingerprint,
        name=corpus_id(corpus.folder) if is_private else "",
        settings=corpus.settings,
        releases=corpus.releases,
        learnt_vocabulary=corpus.learnt_vocabulary,
        history=corpus.history,
        sources=frozenset(sources_of(corpus.folder)),
        weights=read_weights(corpus.folder) if config.mitigation.needs_weights else None,
        people=registered_people(corpus.folder) if is_private else (),
        folder=corpus.folder,
        has_co_owners=corpus.train.owners is not None,
    )


def _weights_tree(facts: CorpusFacts) -> dict[str, str]:
    """What makes a run another one where its corpus was weighed anew; private like the text."""
    if facts.weights is None:
        return {}
    digest = hashlib.sha256(np.ascontiguousarray(facts.weights.rho).tobytes())
    return {"weights_fingerprint": digest.hexdigest()}


def _rows(
    corpus: TokenizedCorpus, config: TrainConfig, tokenizer: Any, without: frozenset[int]
) -> Rows:
    return rows_of(
        corpus,
        sequence_length=config.sequence_length,
        bos=tokenizer.bos_token_id,
        pad=tokenizer.pad_token_id,
        without_users=without,
    )


def _check_rows(rows: Rows, corpus: PreparedCorpus, without_users: frozenset[int]) -> None:
    if len(rows):
        return
    left_out = f" once {len(without_users)} users are left out" if without_users else ""
    raise UsageError(
        f"{corpus.folder} has no token to predict{left_out}. Give a corpus with longer documents."
    )


def _check_needs_no_validation(corpus: PreparedCorpus, config: TrainConfig) -> None:
    for name in ("early_stop", "until_perplexity"):
        if (value := getattr(config, name)) is not None:
            raise UsageError(
                f"{name}={value:g} looks at validation perplexity, and {corpus.folder} holds nothing out. "
                "Run: tightlip prepare CORPUS --holdout 0.2"
            )


def _train_tree(config: TrainConfig) -> dict[str, Any]:
    tree = config.tree()
    if config.model not in BUILT_IN_MODELS:
        tree["model"] = str(Path(config.model).resolve())
    return tree


def _corpus_tree(
    corpus: PreparedCorpus, out: Path, rows: Rows, without_users: frozenset[int]
) -> dict[str, Any]:
    """Where the text is and what it was; of users left out only how many."""
    folder, run = Path(corpus.folder).resolve(), out.resolve()
    # A corpus prepared inside the run moves with it.
    inside = folder.is_relative_to(run)
    return {
        "folder": str(folder.relative_to(run) if inside else folder),
        **fingerprints(corpus),
        "rows_fingerprint": rows.fingerprint(),
        "num_users_left_out": len(without_users),
    }


def plant(rows: Rows, num_canaries: int, *, length: int, key_file: Path, draw: Draw) -> Rows:
    """`rows` and, behind them, about half of the canaries, each a document of a user of its own.

    Canaries are `length` tokens that `draw` gives. The key file keeps them and their coins; where it
    exists, as in a resumed run, they are read from it.

    Holds:
        fair: each canary is in with probability 1/2, whoever else is.
        alone: no canary shares its user or document with anybody.
        same: planting again with the same key file gives the same rows.
    """
    if key_file.exists():
        key = read_check_key(key_file)
        if (len(key), key.length) != (num_canaries, length):
            raise UsageError(
                f"{key_file} holds {len(key)} canaries of {key.length} tokens, and {num_canaries} of {length} were asked for. "
                "Give the old settings, or another --out."
            )
    else:
        key = _drawn(num_canaries, length, draw)
        write_check_key(key_file, key)
    return _with_included(rows, key)


def _drawn(num_canaries: int, length: int, draw: Draw) -> CheckKey:
    if num_canaries < 1 or length < 2:
        raise UsageError(
            f"{num_canaries} canaries of {length} tokens tell nothing. Use --dp-check-canaries 1000 and rows of "
            "at least 2 tokens."
        )
    generator = keyed_generator()
    return CheckKey(
        tokens_ML=draw((num_canaries, length), generator),
        included_M=generator.integers(0, 2, num_canaries).astype(bool),
    )


def _with_included(rows: Rows, key: CheckKey) -> Rows:
    included = np.flatnonzero(key.included_M)
    count = len(included)

    def extended(part: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.concatenate([part, more.astype(part.dtype)])

    if (marks := rows.trained) is not None:
        marks = extended(marks, np.ones(count * key.length))
    return replace(
        rows,
        trained=marks,
        # A corpus read from disk as it is needed is copied into memory here: a row says where
        # its tokens start in one array.
        tokens=extended(rows.tokens, key.tokens_ML[included].ravel()),
        starts=extended(rows.starts, len(rows.tokens) + key.length * np.arange(count)),
        lengths=extended(rows.lengths, np.full(count, key.length)),
        begins=extended(rows.begins, np.full(count, rows.bos is not None)),
        users=extended(rows.users, _after(rows.users) + included),
        documents=extended(rows.documents, _after(rows.documents) + included),
    )


def _after(numbers: np.ndarray) -> int:
    return int(numbers.max(initial=-1)) + 1


def drawn_tokens(kind: str, config: TrainConfig, tokenizer: Any) -> Draw:
    """Draws texts of a kind, so many of so many tokens."""
    special = set(tokenizer.all_special_ids)
    plain = np.setdiff1d(np.arange(len(tokenizer)), list(special))
    if kind == "sampled":
        return _samples(config, tokenizer, sorted(special))
    if kind == "rare":  # vocabularies begin with what is frequent, by count or by merge
        plain = plain[-max(_FEWEST, int(len(plain) * _RARE_SHARE)) :]
    if kind == "new":
        plain = _never_spelt(config, tokenizer)
    return uniform(plain, len(tokenizer))


def uniform(allowed: np.ndarray, vocabulary_size: int) -> Draw:
    if len(allowed) < 2:
        raise UsageError(
            f"A vocabulary of {vocabulary_size} leaves {len(allowed)} words for canaries, which would all read alike. "
            "Give a corpus with more words."
        )
    return lambda shape, generator: generator.choice(allowed, shape)


def _never_spelt(config: TrainConfig, tokenizer: Any) -> np.ndarray:
    """Entries that no text is ever cut into: special ones without a part in training, and rows of the
    model's vocabulary beyond the tokenizer's."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    used = {getattr(tokenizer, name) for name in names}
    own = len(tokenizer)
    if config.model not in BUILT_IN_MODELS:
        own = int(read_configuration(Path(config.model)).get_text_config().vocab_size)
    beyond = range(len(tokenizer), own)
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - used
    found = np.array(sorted({*added, *beyond}), np.int64)
    if len(found) < 2:
        raise UsageError(
            f"dp_check_kind='new' needs entries of the vocabulary that no text is cut into, and {config.model} has {len(found)}. "
            "Use --dp-check-kind rare."
        )
    return found


def _samples(config: TrainConfig, tokenizer: Any, special: list[int]) -> Draw:
    if config.model in BUILT_IN_MODELS:
        raise UsageError(
            f"dp_check_kind='sampled' lets the model to start from write them, and a new {config.model} knows nothing yet. Use "
            "--dp-check-kind rare, or give --model DIR."
        )

    @torch.inference_mode()
    def draw(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
        model = starting_model(config, tokenizer, "cpu").eval()
        begin = tokenizer.bos_token_id
        firsts = np.setdiff1d(np.arange(len(tokenizer)), special)
        parts = []
        for start in range(0, shape[0], _AT_ONCE):
            num = min(_AT_ONCE, shape[0] - start)
            first = np.full((num, 1), begin) if begin is not None else generator.choice(firsts, (num, 1))  # fmt: skip
            ids_BT = torch.from_numpy(first)
            while ids_BT.shape[1] < shape[1] + (begin is not None):
                logits_BV = model(input_ids=ids_BT, use_cache=False).logits[:, -1].double()
                logits_BV[:, special], logits_BV[:, len(tokenizer) :] = -torch.inf, -torch.inf
                # The highest of logits and Gumbel noise is a sample; the noise is the generator's.
                noise = torch.from_numpy(generator.gumbel(size=tuple(logits_BV.shape)))
                chosen_B1 = (logits_BV / TEMPERATURE + noise).argmax(1, keepdim=True)
                ids_BT = torch.cat([ids_BT, chosen_B1], 1)
            parts.append(ids_BT[:, int(begin is not None) :].numpy())
        return np.concatenate(parts)

    return draw
