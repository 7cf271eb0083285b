"""A leakage report in words and in the terminal's tables: its verdict, its headline figures, and what
training longer did."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.table import Table as RichTable

from tightlip.core import figures
from tightlip.core.figures import UNKNOWN, count, counted, guarantee_words, number, percent
from tightlip.report.kit.table import NAMES, Cell, Column, Row, Table, plain_row

Summary = dict[str, Any]  # summary.json, or snapshots.json, as written
SNAPSHOT_COLUMNS = ("epoch", "train ppl", "validation ppl", "unique", "longest unique", "ε_l")

NO_PUBLIC_MODEL = (
    "No public model was given. With --public-model DIR (or leave-out) every sequence gets a ratio: "
    "how much less surprising it is to this model than to one that never saw its writer."
)
NO_PRIOR = (
    "No public model was given, so what anybody would say is not told apart: it counts as a leak like any other text. "
    "Give --public-model DIR."
)
NOT_VALIDATED = (
    "Not measured: give --validation CORPUS to learn how well the model does on text it never saw."
)
MEANINGS = {
    "Leaks": "Stretches of text that the model completes and only one person wrote; sequences that overlap are one leak.",
    "Unique by text": "Sequences whose words only one person wrote: what the leaks are made of.",
    "Beyond the prior": "Of these, sequences that the public model would not say itself behind the same words.",
    "By role": "The same sequences by who says them in the chats, where the model first completes them.",
    "Unique by tokens": "The paper's figure: sequences whose tokens only one person wrote. Others may have written the same words, cut differently.",
    "Unique sequences": "Completed by the model, written by one person only.",
    "People affected": "People with at least one unique sequence the model completes.",
    "Leakage epsilon": "How many times less surprising the worst sequence unique by tokens is to this model than to the public one; near 1 is good.",
    "Ratios": "How the ratio is spread over the sequences unique by tokens: so large a share of them lies at or below each figure.",
    "Curated": "Sequences unique by tokens whose ratio is at least t: the ones a public model finds surprising.",
    "Public model's unique": "Sequences unique by tokens that the public model completes: the benchmark, if it never saw their writers.",
    "Distinct sequences": "Different pieces of text the model completes, whoever wrote them.",
    "Sequences in S": "The same, counting every time the model completes one.",
    "Perplexity": "How surprised the model is by its training corpus; 1 is not at all.",
    "Trained perplexity": "The same over those tokens that were trained on.",
    "Not trained on": "Of what is unique by text, sequences that the model only read: no token of them was trained on.",
    "Validation perplexity": "The same on text it was not trained on; far above the training figure means learning by heart.",
}


class Line(NamedTuple):
    """One headline figure: its name, its value as printed, what it means."""

    name: str
    value: str
    sentence: str


def summary_lines(summary: Summary) -> list[Line]:
    """Every headline figure of a report, the four that matter most first."""
    guarantee = guarantee_words(summary.get("guarantee"))
    documents, tokens = (count(summary.get(name)) for name in ("num_documents", "num_tokens"))
    wrote = f"They wrote {documents} documents, {tokens} tokens: the corpus D."
    return [
        *_leak_lines(summary),
        Line("Guarantee", guarantee.value, f"{guarantee.insecure} {guarantee.sentence}".strip()),
        *_list_lines(summary),
        *_quality_lines(summary),
        Line("People", count(summary.get("num_users")), wrote),
    ]


def _meaning(name: str, value: str, more: str = "") -> Line:
    return Line(name, value, MEANINGS[name] + more)


def _leak_lines(summary: Summary) -> Iterator[Line]:
    is_by_text, users = summary.get("leaks") is not None, summary.get("num_users")
    owners = summary.get("people_affected" if is_by_text else "users_with_unique")
    share = f"{percent(owners / users)} of everybody who wrote" if owners and users else ""
    if is_by_text:
        yield _meaning("Leaks", count(summary["leaks"]))
        whose = f"People whose text the leaks are{share and ', '}{share}."
        yield Line("People affected", _out_of(owners, users), whose)
    else:  # of 0.1, which counted tokens only
        longest = longest_of(summary.get("unique_by_length"))
        tail = "" if longest is None else f" The longest is {counted(longest, 'token')}."
        yield _meaning("Unique sequences", count(summary.get("unique")), tail)
        yield _meaning("People affected", _out_of(owners, users), share and f" That is {share}.")
    yield _epsilon_line(summary)


def _epsilon_line(summary: Summary) -> Line:
    worst, is_crossed = summary.get("leakage_epsilon"), summary.get("cross_tokenizer")
    if worst is None:
        why = "No unique sequence has a finite ratio, so there is no worst one."
        why = NO_PUBLIC_MODEL if summary.get("public_model") is None else why
        return Line("Leakage epsilon", UNKNOWN, why)
    row = summary.get("leakage_epsilon_sequence")
    of = f" It is that of row {count(row)}, counted from 0, of sequences.parquet."
    where = "" if row is None else of
    crossed = " The two models cut text differently, so compare it with care." if is_crossed else ""
    return _meaning("Leakage epsilon", number(worst), where + crossed)


def _list_lines(summary: Summary) -> Iterator[Line]:
    public, p = summary.get("public_unique"), summary.get("p")
    few = f"fewer than {p} people" if p else "few people"
    if summary.get("unique_by_text") is not None:
        yield _meaning("Unique by text", count(summary["unique_by_text"]))
        yield from _prior_lines(summary)
        if roles := by_role(summary):
            yield _meaning("By role", " · ".join(roles))
        if summary.get("not_trained_on"):
            yield _meaning("Not trained on", count(summary["not_trained_on"]))
        yield _meaning("Unique by tokens", count(summary.get("unique")))
    if summary.get("near"):
        yield _near_line(summary["near"])
    if spread := _ratio_spread(summary.get("ratio_quantiles")):
        yield _meaning("Ratios", spread)
    yield _meaning("Curated", _curated(summary.get("curated")))
    if public is None:
        none = "The same count for a public model would be the benchmark; none was given."
        yield Line("Public model's unique", UNKNOWN, none)
    else:
        yield _meaning("Public model's unique", count(public))
    distinct = f"Distinct sequences completed for {few}."
    yield Line(few[0].upper() + few[1:], count(summary.get("fewer_than_p")), distinct)
    yield _meaning("Distinct sequences", count(summary.get("distinct_sequences")))
    yield _meaning("Sequences in S", count(summary.get("sequences_in_s")))


def _prior_lines(summary: Summary) -> Iterator[Line]:
    if "unique_beyond_prior" not in summary:  # of an earlier version
        return
    if (beyond := summary["unique_beyond_prior"]) is None:
        yield Line("Beyond the prior", UNKNOWN, NO_PRIOR)
        return
    leaks = counted(summary["leaks_beyond_prior"], "leak")
    people = counted(summary["people_beyond_prior"], "person", "people")
    every = summary["unique_by_text"]
    where = f" They are in {leaks} of {people}." if beyond else ""
    others = " The others anybody would say." if beyond < every else ""
    yield _meaning("Beyond the prior", _out_of(beyond, every), where + others)


def _near_line(near: dict[str, Any]) -> Line:
    """What a sample of windows says about text that comes out with a digit or a word changed."""
    value = f"{count(near['found'])} of {counted(near['drawn'], 'window')}"
    what = (
        f"Windows of {near['window_tokens']} tokens that one person alone wrote and the model continues, greedily or by "
        f"beam search, with at most {100 * near['distance']:g}% of their characters changed; {count(near['exact'])} of them it completes exactly."
    )
    about, low, high = (count(round(near[name])) for name in ("estimate", "low", "high"))
    if near["found"]:
        what += f" They are {counted(near['people'], 'person', 'people')}'s."
    if near["drawn"] < near["windows"]:
        what += f" Of all {count(near['windows'])} windows that makes about {about} (95%: {low} to {high})."
    return Line("Nearly the same", value, what)


def contexts_table(summary: Summary) -> Table | None:
    """How much of the leaks is left behind each kind of words, where that was asked for."""
    tokens, rows = count(summary.get("short_prefix")), []
    typed = {
        "training": "all that stood before it",
        "short": f"the last {tokens} tokens of that",
        "start": f"the first {tokens} tokens of its document",
        "template": f"“{told}”" if (told := summary.get("context_template")) else "a template",
        "other": f"{tokens} tokens of somebody else's",
    }
    for name, found in (summary.get("contexts") or {}).items():
        known = found or {}
        cells = [count(known.get(key)) for key in ("leaks", "people", "sequences")]
        rows.append(plain_row(typed.get(name, name), *cells, percent(known.get("tokens"))))
    names = ("typed before it", "leaks", "people", "sequences", "tokens")
    columns = [Column(name, wraps=False, left=not place) for place, name in enumerate(names)]
    return Table(columns=columns, rows=rows, heading_style="dim") if rows else None


def _quality_lines(summary: Summary) -> Iterator[Line]:
    k = summary.get("top_k")
    among = "its first guess" if k == 1 else f"among its first {k} guesses"
    held, accuracy = (summary.get(f"validation_{name}") for name in ("perplexity", "accuracy"))
    yield _meaning("Perplexity", number(summary.get("perplexity")))
    if summary.get("trained_perplexity") not in (None, summary.get("perplexity")):
        yield _meaning("Trained perplexity", number(summary["trained_perplexity"]))
    share = f"Share of the corpus' tokens that were {among}."
    yield Line("Accuracy", percent(summary.get("accuracy")), share)
    unseen = NOT_VALIDATED if held is None else MEANINGS["Validation perplexity"]
    yield Line("Validation perplexity", number(held), unseen)
    unseen = NOT_VALIDATED if accuracy is None else f"Share of unseen tokens that were {among}."
    yield Line("Validation accuracy", percent(accuracy), unseen)


def _out_of(part: int | None, whole: int | None) -> str:
    if part is None:
        return UNKNOWN
    return count(part) if whole is None else f"{count(part)} of {count(whole)}"


def _curated(curated: dict[str, Any] | None) -> str:
    if not curated or all(num is None for num in curated.values()):
        return UNKNOWN
    by_t = sorted((float(t), num) for t, num in curated.items())
    return " · ".join(f"{count(num)} (t = {t:g})" for t, num in by_t)


def _ratio_spread(quantiles: dict[str, Any] | None) -> str:
    """
    >>> _ratio_spread({"0.1": 0.8, "0.5": 2.0, "0.9": 40.0, "0.99": 700.0, "1": 89000.0})
    '2.00 (half) · 40.0 (90%) · 700 (99%) · 89,000 (all)'
    """
    names = {"0.5": "half", "0.9": "90%", "0.99": "99%", "1": "all"}
    known = {key: at for key, at in (quantiles or {}).items() if key in names and at is not None}
    return " · ".join(f"{number(at)} ({names[key]})" for key, at in known.items())


def by_role(summary: Summary) -> list[str]:
    """What is unique by text by role, the most first; empty where nobody has a role.

    >>> by_role({"unique_by_role": {"user": 3, "assistant": 1200}})
    ['1,200 assistant', '3 user']
    """
    # Tokens that came without their chat are all "text", which tells nothing.
    known = (summary.get("unique_by_role") or {}).items()
    ranked = sorted(((num, role) for role, num in known if role != "text"), reverse=True)
    return [f"{count(num)} {role}" for num, role in ranked]


def longest_of(num_by_length: dict[str, int] | None) -> int | None:
    """Tokens in the longest sequence of a tally by length, where there is one."""
    return max((int(length) for length, num in (num_by_length or {}).items() if num), default=None)


def verdict(
    summary: Summary, *, num_copied: int = 0, num_untrained: int = 0, longest: int | None = None
) -> tuple[str, list[str]]:
    """The report in one sentence, then what somebody must know to weigh it."""
    distinct, by_tokens = summary.get("distinct_sequences"), summary.get("unique")
    # A report of 0.1 counted tokens only, and sequences instead of leaks.
    unique = by_tokens if summary.get("leaks") is None else summary["leaks"]
    if not distinct and not unique:
        unlike = "An untrained model, or the wrong corpus, looks the same."
        none = f"Not one token of the corpus was among its predictions. {unlike}"
        return "This model completed nothing it was trained on.", [none]
    if unique is None:
        return "How much this model gives away is not known.", []
    if unique == 0:
        shared = f"Each of the {counted(summary['distinct_sequences'], 'sequence')} it completes was written by two people or more."
        if by_tokens:
            alone = counted(by_tokens, "sequence is", "sequences are")
            shared = f"By its tokens alone {alone} one person's, but others wrote the same words, or there is no word in it."
        return "None found: this model completed no text that only one person wrote.", [shared]
    pieces = counted(unique, "piece of text", "pieces of text")
    sentence = f"This model completes {pieces} that only one person wrote."
    return sentence, list(_weighing(summary, unique, num_copied, num_untrained, longest))


def _weighing(
    summary: Summary, unique: int, num_copied: int, num_untrained: int, longest: int | None
) -> Iterator[str]:
    owners, users = summary.get("people_affected"), summary.get("num_users")
    if summary.get("leaks") is None:
        owners = summary.get("users_with_unique")
        longest = longest_of(summary.get("unique_by_length"))
    if owners and users:
        tail = "" if longest is None else f"; the longest is {counted(longest, 'token')}"
        belong = "It belongs" if unique == 1 else "They belong"
        people = counted(users, "person", "people")
        yield f"{belong} to {count(owners)} of {people} ({percent(owners / users)}){tail}."
    num_sequences = summary.get("unique_by_text")
    if num_sequences and num_sequences > unique:
        yield f"The model completes them in {counted(num_sequences, 'sequence')}."
    if roles := by_role(summary):
        yield f"Sequences by role: {', '.join(roles)}."
    if num_untrained:
        yield f"{counted(num_untrained, 'sequence was', 'sequences were')} completed without being trained on."
    if (worst := summary.get("leakage_epsilon")) is not None and not math.isnan(worst):
        times = "far" if math.isinf(worst) else f"{number(worst)} times"
        half = (summary.get("ratio_quantiles") or {}).get("0.5")
        rest = f"; half of them are at most {number(half)} times" if half is not None else ""
        which = "The worst" if num_sequences is None else "Of what is unique by tokens the worst"
        yield f"{which} is {times} less surprising to this model than to the public one{rest}."
    if (beyond := summary.get("unique_beyond_prior")) is not None and num_sequences:
        of_all = f"{count(beyond)} of {counted(num_sequences, 'sequence')}"
        yield f"The public model would not say {of_all} itself."
    elif summary.get("public_unique"):
        pieces = counted(summary["public_unique"], "sequence")
        yield f"The public model completes {pieces} unique by tokens itself: if it never saw this text, some can simply be guessed."
    if num_copied:
        were = "was" if num_copied == 1 else "were"
        sequences = f"{counted(num_copied, 'sequence')}" if num_sequences else count(num_copied)
        yield f"{sequences} {were} already in front of the model when it completed them (marked “copied”)."


def epoch_name(snapshot: dict[str, Any]) -> str:
    """What to call a snapshot on an axis: its epoch, else its step, else its name."""
    if (epoch := snapshot.get("epoch")) is not None and math.isfinite(epoch):
        return f"{epoch:g}"
    step = snapshot.get("step")
    return str(snapshot.get("name")) if step is None else f"step {step}"


def is_best(snapshot: dict[str, Any], snapshots: Summary) -> bool:
    """Whether a snapshot's validation perplexity is the lowest."""
    best = snapshots.get("best_validation")
    return best is not None and snapshot.get("name") == best


def story(snapshots: Summary) -> str:
    """What training longer did, in one sentence."""
    every = snapshots["snapshots"]
    unique = [one["summary"].get("unique") for one in every]
    best = next((place for place, one in enumerate(every) if is_best(one, snapshots)), None)
    if best is None or unique[best] is None or unique[-1] is None:
        return f"Unique sequences went from {count(unique[0])} to {count(unique[-1])} over {counted(len(every), 'snapshot')}."
    if best == len(every) - 1:
        return f"Validation perplexity was still best at the last snapshot, which completes {counted(unique[best], 'unique sequence')}."
    return (
        f"Validation perplexity was best at {every[best]['name']}, with {counted(unique[best], 'unique sequence')}; "
        f"the last snapshot completes {count(unique[-1])}."
    )


def terminal_table(summary: Summary) -> RichTable:
    """The headline figures that are known, each with its sentence, and the notes."""
    shown: list[Row] = []
    for line in summary_lines(summary):
        # What is not known hints at what is missing.
        if line.value != UNKNOWN or line.name in ("Leakage epsilon", "Beyond the prior"):
            style = "bold red" if line.sentence.startswith(figures.INSECURE) else ""
            shown.append(Row(line.name, [Cell(line.value), Cell(line.sentence)], style=style))
    notes = [plain_row("Note", "", note) for note in summary.get("notes") or []]
    columns = [NAMES, Column(style="bold", widest=34), Column(left=True, style="dim")]
    return Table(columns=columns, rows=[*shown, *notes]).printed()


def snapshots_table(snapshots: Summary) -> RichTable:
    """One line per snapshot, the best validation perplexity marked."""
    table = snapshot_figures(snapshots)
    # A column nobody can fill (ε_l without a public model, validation without held-out text) goes.
    places = range(len(table.columns) - 1)
    known = [p for p in places if any(row.cells[p].value != UNKNOWN for row in table.rows)]
    table = table.only(known)
    marked = []
    for row in table.rows:
        mark, style = ("← best validation", "bold") if row.kind else ("", row.style)
        marked.append(row._replace(cells=[*row.cells, Cell(mark)], style=style))
    return Table(columns=[*table.columns, NAMES], rows=marked, heading_style="dim").printed()


def snapshot_figures(snapshots: Summary) -> Table:
    """The figures of each snapshot; the row of the best validation perplexity is called so."""
    rows = [
        plain_row(
            epoch_name(snapshot),
            number(snapshot.get("train_perplexity")),
            number(snapshot.get("validation_perplexity")),
            count(snapshot["summary"].get("unique")),
            count(longest_of(snapshot.get("unique_lengths")) or 0),
            number(snapshot["summary"].get("leakage_epsilon")),
            kind="best" if is_best(snapshot, snapshots) else "",
        )
        for snapshot in snapshots["snapshots"]
    ]
    return Table(columns=[Column(name, wraps=False) for name in SNAPSHOT_COLUMNS], rows=rows)
