"""Canaries: made-up secrets planted in a corpus, so that what a model keeps can be measured.

Every value of every canary is drawn uniformly and independently of the others: a model that
never saw one then ranks it anywhere, which is what exposure is measured against. What was
planted stands in a key, which nobody but its owner reads.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tightlip.core import files
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.progress import log
from tightlip.core.run_folder import is_run, run_around
from tightlip.core.settings import Settings, lines_of, separated, setting, split_settings, takes
from tightlip.corpus.canary_templates import DIGIT_POOL, Pools, Template, read_template
from tightlip.corpus.history import metadata_of
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.corpus.tables import AttributeTypes, DocumentBatch, TableWriter

CORPUS, KEY = "corpus.parquet", "key.json"
# Mireshghallah et al. 2021, appendix: five random words, 14 canaries a user, 195 copies.
PAPER_TEMPLATE = "{words:5}"
PAPER_SCHEDULE = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 40, 50)
SHORT_SCHEDULE = (1, 2, 5, 6, 20)
MOST_COPIES = 10_000_000
Owners = list[tuple[str, int]]  # whose each canary is, and how often it stands there
ALPHA = 0.05  # of all models that saw no canary, how many may raise an alarm


def exposed_above_bits(num_canaries: int, alpha: float = ALPHA) -> float:
    """The bits that none of so many canaries passes by chance, but for `alpha` of all models.

    >>> exposed_above_bits(1, alpha=0.25)
    2.0
    """
    return math.log2(num_canaries / alpha)


@dataclass(frozen=True, kw_only=True)
class CanaryConfig(Settings):
    """What to plant. Without `templates`: the paper's word canaries, for each user.

    Without `repetitions` the paper's schedule; where canaries are planted for each user, users
    with fewer documents than its 195 copies get its shorter one.
    """

    templates: tuple[str, ...] = setting(
        (),
        "Such as 'My ID is {digits:6}'; slots {digits:N}, {words:N}, {names}. May be given again.",
        flag="--template",
        default_words="five random words, for each user",
    )
    repetitions: tuple[int, ...] | None = setting(
        None,
        "How often: one canary a number, such as 1,10,100.",
        parse=separated(int),
        default_words="the paper's, 1 to 50",
    )
    per_user: bool = setting(False, "Canaries of their own for each user.", flag="--per-user")
    words: tuple[str, ...] | None = setting(
        None,
        "A file of words, one a line, for {words:N}.",
        parse=lines_of,
        default_words="the corpus' own",
        path="FILE",
    )
    names: tuple[str, ...] | None = setting(
        None, "A file of names, one a line, for {names}.", parse=lines_of, path="FILE"
    )
    num_words: int = setting(1000, "Without a file of words: so many of the most frequent.")
    seed: int = setting(0, "Decides the secrets.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repetitions is not None and min(self.repetitions, default=0) < 1:
            raise UsageError(
                f"repetitions={list(self.repetitions)} must be one or more numbers from 1 on, such as 1,10,100."
            )
        if self.num_words < 2:
            raise UsageError(f"num_words={self.num_words} leaves nothing to draw. Use 1000.")


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One secret: what it reads, whose it is, and how often it stands in the training text.

    A real one is text that somebody wrote, so it has no template and no values.
    """

    text: str
    user: str
    repetitions: int
    template: str | None = None
    values: tuple[str, ...] = ()
    kind: Literal["planted", "real"] = "planted"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The key: every canary, and the lists that the values of planted ones were drawn from.

    A key of real canaries names the model that chose them, and that run's snapshots.
    """

    canaries: list[Canary]
    pools: dict[str, list[str]]
    model_fingerprint: str | None = None
    snapshot_fingerprints: tuple[str, ...] = ()
    num_users_left_out: int = 0

    @property
    def of_planted(self) -> list[Canary]:
        return [canary for canary in self.canaries if canary.kind == "planted"]

    @property
    def chosen_by(self) -> frozenset[str]:
        """Fingerprints of the models that real canaries were chosen with."""
        return frozenset(filter(None, [self.model_fingerprint, *self.snapshot_fingerprints]))


@takes(CanaryConfig, ColumnSettings)
def plant_canaries(corpus: Any, out: str | Path, **settings: Any) -> Planted:
    """Write OUT/corpus.parquet, a corpus with canaries in it, and OUT/key.json, which says what
    they are."""
    config, columns = split_settings(settings, CanaryConfig, ColumnSettings)
    _refuse_folders_of_ours(corpus)
    return plant_in(open_corpus(corpus, **columns.tree()), Path(out), config)


def _refuse_folders_of_ours(corpus: Any) -> None:
    """A prepared folder holds its held-out text too, which must not be trained on."""
    from tightlip.corpus.prepare import is_prepared  # with transformers, which takes its time

    if not isinstance(corpus, str | Path):
        return
    record = run_around(Path(corpus)) if is_run(Path(corpus)) else None
    if record is not None and record.folder.resolve() == Path(corpus).resolve():
        raise UsageError(
            f"{corpus} is a run, and canaries are planted before training. Plant in its text and train anew: "
            f"tightlip canaries plant {record.corpus_folder / 'train.parquet'}"
        )
    if is_prepared(Path(corpus)):
        raise UsageError(
            f"{corpus} is a prepared corpus, held-out text included. Plant in what is trained on: "
            f"tightlip canaries plant {Path(corpus) / 'train.parquet'}"
        )


def plant_in(corpus: Corpus, out: Path, config: CanaryConfig) -> Planted:
    """Write OUT/corpus.parquet, the corpus with canaries among its documents, and OUT/key.json.

    A copy is a document of its own, at a random place; all copies of a canary belong to one
    user.

    Holds:
        nothing_lost: without the copies, the documents are those of `corpus` in their order.
        as_often: every canary is there as often as the key says, under the user it says.
        unique: no two canaries read alike.
        uniform: each text that a template can spell is as likely as any other.
        warned: canaries whose exposure could never be shown are named in the log.
        same: the same corpus, settings and seed give the same key.
    """
    with files.claimed(out):
        if files.names_in(out):
            raise UsageError(f"{out} is not empty. Give another --out.")
        templates = [*map(read_template, dict.fromkeys(config.templates or [PAPER_TEMPLATE]))]
        num_by_user, types = _counted(corpus)
        draw = np.random.default_rng(config.seed)
        pools = _pools(corpus, templates, config)
        owners = _owners(num_by_user, config, draw)
        _check_num_copies(len(templates) * sum(times for _, times in owners), types.num_documents)
        planted = Planted(canaries=_drawn(templates, owners, pools, draw), pools=pools)
        with files.folder_written_whole(out) as folder:
            write_canary_key(folder / KEY, planted)
            with TableWriter(
                folder / CORPUS, types.by_column, metadata_of(corpus.history), users=types.users
            ) as writer:
                for batch in _with_copies(corpus, planted.canaries, types.num_documents, draw):
                    writer.write(batch)
    _warn_of_small_spaces(planted)
    return planted


def _check_num_copies(num_copies: int, num_documents: int) -> None:
    if num_copies > MOST_COPIES:
        raise UsageError(
            f"The repetitions ask for {num_copies:,} copies in a corpus of {num_documents:,} documents. Use fewer: at most "
            f"{MOST_COPIES:,} in all."
        )


def _counted(corpus: Corpus) -> tuple[Counter[str], AttributeTypes]:
    num_by_user: Counter[str] = Counter()
    types = AttributeTypes()
    for batch in corpus.batches():
        num_by_user.update(batch.users)
        types.add(batch)
    return num_by_user, types


def _pools(
    corpus: Corpus, templates: Sequence[Template], config: CanaryConfig
) -> dict[str, list[str]]:
    """The list of every kind of slot that some template has."""
    from tightlip.corpus.vocabulary import words_by_frequency

    kinds = sorted({place for template in templates for place in template.places})
    given = {"digits": DIGIT_POOL, "names": config.names, "words": config.words}
    if "words" in kinds and config.words is None:
        letters = (word for word in words_by_frequency(corpus) if word[0].isalpha())
        given["words"] = tuple(islice(letters, config.num_words))
    return {kind: _distinct(given[kind], kind) for kind in kinds}


def _distinct(values: Sequence[str] | None, kind: str) -> list[str]:
    if values is None:
        raise UsageError(
            f"A template has a {{{kind}}} slot and no list was given. Give {kind}; on the command line: a file with one a line."
        )
    distinct = list(dict.fromkeys(value.strip() for value in values if value.strip()))
    if len(distinct) < 2:
        raise UsageError(
            f"The list of {kind} holds {len(distinct)} different values, so nothing can be drawn from it. Give two or more."
        )
    return distinct


def _owners(
    num_by_user: Mapping[str, int], config: CanaryConfig, draw: np.random.Generator
) -> Owners:
    """Whose documents each canary of one template goes among, and how often."""
    users = [str(user) for user in num_by_user]  # their own: a planted text has no other owner
    if config.per_user or not config.templates:
        return [(user, times) for user in users for times in _schedule(config, num_by_user[user])]
    schedule = config.repetitions or PAPER_SCHEDULE
    # Users of their own as far as there are any: a canary's leak then names one person's text.
    chosen = np.resize(draw.permutation(len(users)), len(schedule))
    return [(users[number], times) for number, times in zip(chosen, schedule, strict=True)]


def _schedule(config: CanaryConfig, num_documents: int) -> Sequence[int]:
    if config.repetitions is not None:
        return config.repetitions
    return SHORT_SCHEDULE if num_documents < sum(PAPER_SCHEDULE) else PAPER_SCHEDULE


def _drawn(
    templates: Sequence[Template], owners: Owners, pools: Pools, draw: np.random.Generator
) -> list[Canary]:
    taken: set[str] = set()
    canaries: list[Canary] = []
    for template in templates:
        drawn = template.drawn(len(owners), pools, taken, draw)
        for (user, times), values in zip(owners, drawn, strict=True):
            told: dict[str, Any] = {"template": template.text, "values": values}
            text = template.filled(values)
            canaries.append(Canary(text=text, user=user, repetitions=times, **told))
    return canaries


def _warn_of_small_spaces(planted: Planted) -> None:
    """Say of which templates even a canary known by heart does not pass the bar."""
    num = len(planted.canaries)
    above = exposed_above_bits(num)
    for name in dict.fromkeys(str(canary.template) for canary in planted.canaries):
        template = read_template(name)
        readings = template.readings(planted.pools)
        num_planted = sum(len(readings.of(canary.text)) for canary in planted.canaries)
        bits = math.log2(max(template.num_candidates(planted.pools) - num_planted + 1, 1))
        if bits <= above:
            log.warning(
                "Exposure of %r can never be shown: a canary known by heart has %.1f bits, and among %s canaries "
                "more than %.1f are needed. Plant fewer canaries, or use larger slots.",
                name,
                bits,
                f"{num:,}",
                above,
            )


def _with_copies(
    corpus: Corpus, canaries: Sequence[Canary], num_documents: int, draw: np.random.Generator
) -> Iterator[DocumentBatch]:
    """The corpus' batches with every copy before the document of a random number."""
    copies = np.repeat(np.arange(len(canaries)), [canary.repetitions for canary in canaries])
    draw.shuffle(copies)
    before = np.sort(draw.integers(0, num_documents + 1, len(copies)))
    done = start = 0
    for batch in corpus.batches():
        end = start + len(batch)
        here = int(np.searchsorted(before, num_documents + 1 if end == num_documents else end))
        places = before[done:here] - start
        yield _merged(batch, places, [canaries[number] for number in copies[done:here]])
        done, start = here, end


def _merged(batch: DocumentBatch, places: np.ndarray, copies: list[Canary]) -> DocumentBatch:
    def merge(own: list, more: list) -> list:
        # Stable: a copy for place i stands just before document i.
        order = np.argsort(np.concatenate([places, np.arange(len(batch))]), kind="stable")
        both = [*more, *own]
        return [both[number] for number in order]

    return DocumentBatch(
        users=merge(batch.users, [copy.user for copy in copies]),
        texts=merge(batch.texts, [copy.text for copy in copies]),
        attributes={
            name: merge(values, [None] * len(copies)) for name, values in batch.attributes.items()
        },
    )


def write_canary_key(path: Path, key: Planted) -> None:
    """The key as JSON, for its owner only: whoever reads it knows every secret."""
    files.write_sealed(path, asdict(key))


def read_canary_key(path: Path) -> Planted:
    """The key in `path`, or a refusal where it is not one."""
    if not path.is_file():
        raise UsageError(
            f"{path} is not a key of canaries. Run: tightlip canaries plant CORPUS --out DIR"
        )
    try:
        there, _ = files.read_sealed(path)
    except DamagedError as error:
        raise DamagedError(
            f"{error} If it never was a key of canaries: tightlip canaries plant CORPUS --out DIR writes one."
        ) from error
    try:
        key = Planted(
            canaries=[Canary(**(e | {"values": tuple(e["values"])})) for e in there["canaries"]],
            pools={name: list(map(str, values)) for name, values in there["pools"].items()},
            model_fingerprint=there.get("model_fingerprint"),
            snapshot_fingerprints=tuple(there.get("snapshot_fingerprints", ())),
            num_users_left_out=int(there.get("num_users_left_out", 0)),
        )
        _check_whole(key)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        # Other errors quote what they read: given by mistake, a corpus would land in a log.
        reason = f"{error}" if type(error) is ValueError else type(error).__name__
        raise UsageError(
            f"{path} is damaged, or no key of canaries ({reason}). Put a whole copy back, or plant again."
        ) from error
    return key


def _check_whole(key: Planted) -> None:
    if not key.canaries:
        raise ValueError("there are no canaries")
    for canary in key.canaries:
        if type(canary.repetitions) is not int or canary.repetitions < 1:
            raise ValueError("a canary's repetitions are no number from 1 on")
        if not isinstance(canary.text, str) or not isinstance(canary.user, str):
            raise ValueError("a canary's text or user is no text")
        if canary.kind == "planted":
            _check_planted(canary, key.pools)
        elif canary.kind != "real" or not key.model_fingerprint:
            raise ValueError("a canary is neither planted nor chosen by a known model")


def _check_planted(canary: Canary, pools: Pools) -> None:
    template = read_template(str(canary.template))
    if template.filled(canary.values) != canary.text:
        raise ValueError("a canary is not its template with its values")
    for place, value in zip(template.places, canary.values, strict=True):
        if value not in pools[place]:
            raise ValueError(f"a canary's value is not among the {place}")


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckKey:
    """The key of a run's check canaries: the tokens of each, and whether it was trained on.

    Training writes it, `tightlip dp-check` reads it. These canaries are nobody's text, so their
    coins, unlike any real person's, may be written down; still only the owner reads them, since
    whoever knows the coins can guess them. Shapes: M canaries, L tokens of each.
    """

    tokens_ML: np.ndarray
    included_M: np.ndarray

    def __len__(self) -> int:
        return len(self.included_M)

    @property
    def length(self) -> int:
        return self.tokens_ML.shape[1]


def write_check_key(path: Path, key: CheckKey) -> None:
    files.write_json(
        path,
        {
            "num_canaries": len(key),
            "length": key.length,
            "included": key.included_M.tolist(),
            "tokens": [" ".join(map(str, tokens)) for tokens in key.tokens_ML.tolist()],
        },
    )


def read_check_key(path: Path) -> CheckKey:
    """The key in `path`, or a refusal where it is not whole."""
    try:
        there = files.read_json(path)
        key = CheckKey(
            tokens_ML=np.array([text.split() for text in there["tokens"]], np.int64),
            included_M=np.array(there["included"], bool),
        )
        shape = (there["num_canaries"], there["length"])
        if key.tokens_ML.shape != shape or len(key) != len(key.tokens_ML):
            raise ValueError("canaries are missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged ({error}), so nobody knows which canaries were trained on. Put a whole "
            "copy back, or train again with another --out."
        ) from error
    return key
