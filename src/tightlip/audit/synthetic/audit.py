"""The audit of a text as one call: whose stretches it repeats, and whether more than strangers'."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tightlip
from tightlip.audit.leakage.counting import check_memory
from tightlip.audit.leakage.findings import REDACTED, WORK, folder_for, writing_report
from tightlip.audit.leakage.runs import Runs, distinct_sequences
from tightlip.audit.leakage.summary import Report
from tightlip.audit.leakage.tables import user_names, write_table
from tightlip.audit.settings import ResamplingSettings, SyntheticConfig
from tightlip.audit.synthetic.overlap import Overlap, Search
from tightlip.audit.synthetic.reading import cut_texts, open_synthetic, read_words
from tightlip.core.errors import UsageError
from tightlip.core.files import make_private_folder, write_json
from tightlip.core.gates import Entries, Known, failures
from tightlip.core.registry import look_up
from tightlip.core.resampling import UserDraws, tail_share
from tightlip.core.settings import bytes_from, split_settings
from tightlip.corpus.opening import CorpusSource
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.corpus.tokens import TokenizedCorpus

TABLES = ("stretches", "users", "documents")
NAMES = {*(f"{name}.parquet" for name in TABLES), "summary.json", "report.html", "log.txt", WORK, REDACTED}  # fmt: skip
SETTINGS = (SyntheticConfig, ColumnSettings, ResamplingSettings)
MOST_ROWS = 8  # documents named of each stretch
NUM_LENGTHS = 6  # --min-words and its doubles, at which people are counted
_WITH_ENDS = Entries(names=("value", "low", "high"))
FIGURES: Known = {
    **dict.fromkeys(("copies", "near_copies", "people_affected", "documents_affected")),
    **dict.fromkeys(("longest", "longest_near", "copied_share", "copies_not_in_control")),
    **dict.fromkeys(("copies_longer_than_control", "longest_alone")),
    **dict.fromkeys(("shared", "num_users", "num_documents", "num_words")),
    **dict.fromkeys(("per_thousand_words", "share_affected", "expected", "ratio"), _WITH_ENDS),
    "by_length": Entries(names=("p_value", "words", "people", "control")),
}


class TextReport(Report):
    """What an audit of a text found: `report.copies` and all of its summary."""

    kind, command = "a report on a text", "audit-text"

    def table(self, name: str) -> pa.Table:
        """'stretches', 'users' or 'documents', as Arrow."""
        return self._table(f"{name}.parquet")

    def failed(self, *conditions: str, baseline: "TextReport | None" = None) -> list[str]:
        """Which of 'copies>0' and the like hold, each with its figure: empty means all is well."""
        before = None if baseline is None else baseline.summary
        return failures(self.summary, conditions, FIGURES, baseline=before)


@dataclass(frozen=True, kw_only=True)
class Side:
    """The people of one corpus and what the synthetic text has of theirs.

    Stretches that read the same are one of `rows`, longest first: that with the fewest changes, the
    earliest. `owned` has a column (row, user) for each owner, `places` one (start, end, row) for
    each place of the synthetic text.
    """

    corpus: TokenizedCorpus
    overlap: Overlap
    rows: np.ndarray
    owned: np.ndarray
    places: np.ndarray

    @property
    def is_exact(self) -> np.ndarray:
        return np.asarray(self.rows["changes"] == 0)

    @property
    def is_alone(self) -> np.ndarray:
        """Which rows nobody of the other corpus wrote."""
        return np.asarray(self.rows["others"] == 0)

    @property
    def num_words(self) -> np.ndarray:
        """How long each row is."""
        return np.asarray(self.rows["ends"] - self.rows["starts"])

    @property
    def words_of_users(self) -> np.ndarray:
        documents, owners = self.corpus.owned()
        return np.bincount(owners, np.diff(self.corpus.bounds)[documents], self.corpus.num_users)

    def by_user(self, chosen: np.ndarray) -> np.ndarray:
        """How many of the chosen rows each person has."""
        own = self.owned[1][chosen[self.owned[0]]]
        return np.bincount(own, minlength=self.corpus.num_users)

    def counts(self) -> dict[str, int]:
        return {
            "copies": int(self.is_exact.sum()),
            "near_copies": int((~self.is_exact).sum()),
            "people_affected": len(np.unique(self.owned[1])),
            "num_users": self.corpus.num_users,
            "num_documents": self.corpus.num_documents,
            "num_words": self.corpus.num_tokens,
        }


def side_of(search: Search, corpus: TokenizedCorpus, other: TokenizedCorpus | None) -> Side:
    check_memory(corpus, search.memory_bytes // search.engine.workers)
    overlap = search.overlap_with(corpus, other)
    own = overlap.own
    runs = Runs(starts=own["starts"], lengths=own["ends"] - own["starts"], documents=own["starts"])
    number = distinct_sequences(np.asarray(search.synthetic.tokens), runs).number_of_run
    best = np.lexsort((own["places"], own["starts"], own["others"], own["changes"], number))
    rows = own[best[np.unique(number[best], return_index=True)[1]]]
    order = np.lexsort((rows["starts"], rows["changes"], rows["starts"] - rows["ends"]))
    row = np.argsort(order)[number]
    return Side(
        corpus=corpus,
        overlap=overlap,
        rows=rows[order],
        owned=np.unique(np.stack([row, own["owners"]]), axis=1),
        places=np.unique(np.stack([own["starts"], own["ends"], row]), axis=1),
    )


def audit_synthetic(
    synthetic: Any,
    corpus: Any,
    *,
    control: Any,
    out: str | Path | None,
    engine: str,
    write_page: Callable[[Path], object],
    **settings: Any,
) -> TextReport:
    """What `tightlip.audit_text` says it does; `write_page` draws the report once its figures stand."""
    config, columns, resampling = split_settings(settings, *SETTINGS)
    if engine != "local":
        raise UsageError(
            f"audit-text counts on this machine only, and engine={engine!r} was asked for. Leave --engine out."
        )
    how = {**columns.tree(), "format": config.format}
    folder, keep_alive = folder_for(out)
    sources = {"corpus": corpus} if control is None else {"corpus": corpus, "control": control}
    texts = {name: CorpusSource(source, how).documents() for name, source in sources.items()}
    texts = {"synthetic": open_synthetic(synthetic, how), **texts}
    with writing_report(folder, write_page, redact=config.redact, names=NAMES):
        (folder / "summary.json").unlink(missing_ok=True)
        work, numbers = make_private_folder(folder / WORK), dict[str, int]()
        words = {name: read_words(texts[name], numbers, work, name) for name in texts}
        search = Search(
            synthetic=words.pop("synthetic"),
            min_words=config.min_words,
            near=config.near,
            engine=look_up("engine", engine)(),
            memory_bytes=bytes_from(config.memory),
        )
        own, other = words["corpus"], words.get("control")
        _refuse_people_on_both_sides(own, other)
        sides = [side_of(search, own, other)]
        sides += [] if other is None else [side_of(search, other, own)]
        found = _Findings(search=search, sides=sides, config=config, texts=texts)
        found.write_tables(folder)
        write_json(folder / "summary.json", found.summary(resampling))
    return TextReport(folder, keep_alive)


def _refuse_people_on_both_sides(corpus: TokenizedCorpus, control: TokenizedCorpus | None) -> None:
    both = {*corpus.user_names} & {*(control.user_names if control else ())}
    if control and both:
        raise UsageError(
            f"{len(both):,} of the control's {control.num_users:,} people are in the corpus too, so they do not tell what "
            "strangers' text would show. Leave them out of the control; if they are other people, give them other names."
        )


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """All that a report says."""

    search: Search
    sides: list[Side]  # the corpus', and the control's where there is one
    config: SyntheticConfig
    texts: dict[str, Any]

    def summary(self, resampling: ResamplingSettings) -> dict[str, Any]:
        """What summary.json holds. What is not known is None."""
        side, synthetic, redacted = self.sides[0], self.search.synthetic, self.config.redact
        exact, (starts, ends, _) = side.is_exact, side.places
        before = np.maximum.accumulate(np.append(0, ends))[:-1]
        covered = np.maximum(0, ends - np.maximum(starts, before)).sum()
        return {
            **side.counts(),
            "documents_affected": len(np.unique(self._documents())),
            "longest": int(side.num_words[exact].max(initial=0)),
            "longest_near": int(side.num_words[~exact].max(initial=0)),
            "copied_share": float(covered / max(1, synthetic.num_tokens)),
            "shared": side.overlap.num_distinct - int(exact.sum()),
            "copies_not_in_control": int((exact & side.is_alone).sum()) if self.sides[1:] else None,
            **compared(self.sides, resampling, self.config.min_words),
            "min_words": self.config.min_words,
            "near": self.config.near,
            "core_words": self.search.core,
            "synthetic_documents": synthetic.num_documents,
            "synthetic_words": synthetic.num_tokens,
            # A hash of the text lets whoever knows all of it but a PIN try every PIN.
            "corpus_fingerprint": None if redacted else side.corpus.corpus_fingerprint,
            "synthetic_fingerprint": None if redacted else synthetic.corpus_fingerprint,
            "redacted": redacted,
            "version": tightlip.__version__,
            "notes": list(self._notes()),
        }

    def _documents(self) -> np.ndarray:
        """The synthetic document of every place."""
        starts = self.sides[0].places[0]
        return np.searchsorted(self.search.synthetic.bounds, starts, side="right") - 1

    def _notes(self) -> Iterator[str]:
        for name, text in self.texts.items():
            if text.num_skipped:
                yield f"{text.num_skipped:,} unusable rows of the {name} were skipped and are not counted."
        if untried := sum(side.overlap.num_untried for side in self.sides):
            yield (
                f"{untried:,} short stretches stand at more than 1,000 places of their owner's documents. Only the first 1,000 "
                "were tried for copies with changes, so there may be more or longer ones."
            )

    def write_tables(self, folder: Path) -> None:
        side, documents = self.sides[0], self._documents()
        corpus, names = side.corpus, user_names(side.corpus, self.config.redact)
        affected, at = np.unique(documents, return_inverse=True)
        tables = {
            "stretches": self._stretches(names, documents),
            "users": {
                "user": names,
                "num_documents": np.bincount(corpus.owned()[1], minlength=corpus.num_users),
                "num_words": side.words_of_users.astype(np.int64),
                "copies": side.by_user(side.is_exact),
                "near_copies": side.by_user(~side.is_exact),
                "longest": _most(side.owned[1], side.num_words[side.owned[0]], corpus.num_users),
            },
            "documents": {
                "row": affected,
                "stretches": np.bincount(at, minlength=len(affected)),
                "longest": _most(at, side.places[1] - side.places[0], len(affected)),
            },
        }
        for name, columns in tables.items():
            write_table(folder / f"{name}.parquet", pa.table(columns))

    def _stretches(self, names: list[str], documents: np.ndarray) -> dict[str, Any]:
        side, synthetic = self.sides[0], self.search.synthetic
        rows, num_rows, near = side.rows, len(side.rows), np.flatnonzero(~side.is_exact)
        owners, places = ([list[Any]() for _ in range(num_rows)] for _ in range(2))
        for row, user in side.owned.T.tolist():
            owners[row].append(names[user])
        for row, document in zip(side.places[2].tolist(), documents.tolist(), strict=True):
            if len(places[row]) < MOST_ROWS and document not in places[row]:
                places[row].append(document)
        texts, written = (np.full(num_rows, None, object) for _ in range(2))
        if not self.config.redact:
            texts[:] = cut_texts(self.texts["synthetic"], synthetic, rows["starts"], side.num_words)
            there = (side.corpus, rows["places"][near], rows["num_written"][near])
            written[near] = cut_texts(self.texts["corpus"], *there)
        first = np.searchsorted(synthetic.bounds, rows["starts"], side="right") - 1
        return {
            "text": pa.array(texts, pa.string()),
            "written": pa.array(written, pa.string()),
            "num_words": side.num_words.astype(np.int32),
            "changes": rows["changes"].astype(np.int32),
            "times": np.bincount(side.places[2], minlength=num_rows),
            "rows": pa.array(places, pa.list_(pa.int64())),
            "first_word": rows["starts"] - synthetic.bounds[first],
            "owners": pa.array(owners, pa.list_(pa.string())),
            "users_in_control": pa.array(
                rows["others"], mask=np.full(num_rows, not self.sides[1:])
            ),
        }


def _most(of: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    most = np.zeros(size, np.int64)
    np.maximum.at(most, of, values)
    return most


def compared(sides: list[Side], resampling: ResamplingSettings, min_words: int) -> dict[str, Any]:
    """How much more the text has of the corpus' people than of the control's.

    Counted is what nobody of the other side wrote, so that what many say counts on neither and it
    does not matter which side has more people.
    """
    names = ("per_thousand_words", "share_affected", "longest_alone", "expected", "ratio", "copies_longer_than_control", "by_length", "control")  # fmt: skip
    if not sides[1:]:
        return dict.fromkeys(names)
    seeded = [replace(resampling, seed=resampling.seed + n) for n in range(len(sides))]
    rates, shares, draws = zip(*map(_rates, sides, seeded), strict=True)
    thousands = sides[0].words_of_users.sum() / 1000
    expected = {end: value and value * thousands for end, value in rates[1].items()}
    ratio = _ratio(*rates, *draws, num_users=min(side.corpus.num_users for side in sides))
    longest = [int(side.num_words[side.is_alone].max(initial=0)) for side in sides]
    bar = _longest_but_one(sides[1])
    longer = int((sides[0].num_words[sides[0].is_alone] > max(bar, min_words)).sum())
    of_control = dict(zip(names, (rates[1], shares[1], longest[1]), strict=False))
    of_control["longest_but_one"] = bar
    found = (rates[0], shares[0], longest[0], expected, ratio, longer, _by_length(sides, min_words), sides[1].counts() | of_control)  # fmt: skip
    return dict(zip(names, found, strict=True))


def _longest_but_one(side: Side) -> int:
    """The words of the longest stretch once the person with the longest is left out, and all that
    they own: one quotation, or one person who quotes at length, says nothing of common phrases."""
    words, (rows, owners) = np.where(side.is_alone, side.num_words, 0), side.owned
    whose = owners[np.argmax(words[rows])] if len(rows) else -1
    words[rows[owners == whose]] = 0
    return int(words.max(initial=0))


def _by_length(sides: list[Side], min_words: int) -> dict[str, Any]:
    """Who has a stretch of so many words or more, at the length where the corpus' people are most
    too many; `p_value` allows for all lengths that were looked at.

    Were neither side seen, whoever has one would be on either by chance: by the share of people, or
    of words where these are few among many. The larger one is taken, and one person moves little.
    """
    from scipy.special import bdtrc

    sizes = [(side.corpus.num_users, side.corpus.num_tokens) for side in sides]
    share = max(mine / max(1, mine + theirs) for mine, theirs in zip(*sizes, strict=True))
    found = []
    for words in min_words << np.arange(NUM_LENGTHS):
        long = [side.is_alone & (side.num_words >= words) for side in sides]
        people = [int((side.by_user(own) > 0).sum()) for side, own in zip(sides, long, strict=True)]
        chance = NUM_LENGTHS * float(bdtrc(people[0] - 1, sum(people), share))
        found.append((min(1.0, chance), int(words), *people))
    return dict(zip(("p_value", "words", "people", "control"), min(found), strict=True))


def _rates(side: Side, resampling: ResamplingSettings) -> tuple[Any, Any, np.ndarray]:
    """Copies per thousand words and the share of people with any, over people drawn again."""
    own, num_users = side.is_alone, side.corpus.num_users
    copies, words = side.by_user(own & side.is_exact), side.words_of_users / 1000
    seed, num_draws = resampling.seed, resampling.num_bootstraps
    draws = UserDraws(range(num_users), seed=seed, num_draws=num_draws)
    sums, all_words = draws.sums(np.stack([copies, words], axis=1)), max(words.sum(), 1e-3)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = sums[:, 0] / sums[:, 1]
    rate = draws.interval(copies.sum() / all_words, drawn)
    if rate["value"] == 0 and rate["high"] is not None:
        # Every draw has none; so many people may have one all the same.
        rate["high"] = draws.share(copies > 0)["high"] * num_users / all_words
    return rate, draws.share(side.by_user(own) > 0), drawn


def _ratio(
    rate: dict[str, Any], base: dict[str, Any], drawn: np.ndarray, of_base: np.ndarray, *, num_users: int
) -> dict[str, Any]:  # fmt: skip
    """How many times as much as of the control; where either has none, by what it may have all the same."""
    if rate["low"] is None or base["low"] is None:
        return dict.fromkeys(("value", "low", "high"))
    if base["value"] == 0:
        return {"value": None, "low": rate["low"] / base["high"], "high": None}
    if (
        rate["value"] == 0
    ):  # in every draw too: how many there may be all the same, its own end says
        high = rate["high"] / base["low"] if base["low"] > 0 else None
        return {"value": 0.0, "low": 0.0, "high": high}
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = drawn / of_base
    ratios, tail = ratios[~np.isnan(ratios)], tail_share(num_users)
    low = float(np.quantile(ratios, tail, method="lower"))
    high = float(np.quantile(ratios, 1 - tail, method="higher"))
    value = rate["value"] / base["value"]
    return {"value": value, "low": low, "high": high if np.isfinite(high) else None}
