"""Headline figures, one plain sentence each, for the terminal and the page alike."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tightlip.core.figures import (
    INSECURE,
    UNKNOWN,
    count,
    counted,
    guarantee_words,
    number,
    percent,
)

if TYPE_CHECKING:
    from rich.table import Table


NO_PUBLIC_MODEL = (
    "No public model was given. With --public-model DIR (or leave-out) every sequence gets a ratio: "
    "how much less surprising it is to this model than to one that never saw its writer."
)


class Line(NamedTuple):
    """One headline figure: its name, its value as printed, what it means."""

    name: str
    value: str
    sentence: str


def summary_lines(summary: dict[str, Any]) -> list[Line]:
    """Every headline figure of a report, the four that matter most first."""
    return [
        *_leak_lines(summary),
        _guarantee_line(summary),
        *_list_lines(summary),
        *_quality_lines(summary),
        _corpus_line(summary),
    ]


def _leak_lines(summary: dict[str, Any]) -> list[Line]:
    owners, users, worst = (
        summary.get(key) for key in ("users_with_unique", "num_users", "leakage_epsilon")
    )
    longest = longest_unique(summary)
    tail = "" if longest is None else f" The longest is {counted(longest, 'token')}."
    share = (
        f" That is {percent(owners / users)} of everybody who wrote." if owners and users else ""
    )
    if worst is None:
        epsilon = Line("Leakage epsilon", UNKNOWN, _why_no_ratio(summary))
    else:
        crossed = (
            " The two models cut text differently, so compare it with care."
            if summary.get("cross_tokenizer")
            else ""
        )
        sentence = "How many times less surprising the worst unique sequence is to this model than to the public one; near 1 is good."
        epsilon = Line("Leakage epsilon", number(worst), sentence + crossed)
    return [
        Line(
            "Unique sequences",
            count(summary.get("unique")),
            f"Completed by the model, written by one person only.{tail}",
        ),
        Line(
            "People affected",
            _out_of(owners, users),
            f"People with at least one unique sequence the model completes.{share}",
        ),
        epsilon,
    ]


def _why_no_ratio(summary: dict[str, Any]) -> str:
    if summary.get("public_model") is None:
        return NO_PUBLIC_MODEL
    return "No unique sequence has a finite ratio, so there is no worst one."


def _guarantee_line(summary: dict[str, Any]) -> Line:
    words = guarantee_words(summary.get("guarantee"))
    return Line("Guarantee", words.value, f"{words.insecure} {words.sentence}".strip())


def print_guarantee(guarantee: dict[str, Any], console: Any) -> None:
    """One line with ε, its δ, unit and standing; a red one below where it protects nobody."""
    words = guarantee_words(guarantee)
    console.print(f"{'guarantee':24} {words.value}", soft_wrap=True)
    if words.insecure:
        console.print(words.insecure, style="bold red", soft_wrap=True)


def _list_lines(summary: dict[str, Any]) -> list[Line]:
    p = summary.get("p")
    few = (
        f"Distinct sequences completed for fewer than {p} people."
        if p
        else "Distinct sequences completed for few people."
    )
    public = summary.get("public_unique")
    benchmark = (
        "Unique sequences the public model completes too: the benchmark, if it never saw their writers."
        if public is not None
        else "The same count for a public model would be the benchmark; none was given."
    )
    return [
        Line(
            "Curated",
            _curated(summary.get("curated")),
            "Unique sequences whose ratio is at least t: the ones a public model finds surprising.",
        ),
        Line("Public model's unique", count(public), benchmark),
        Line(
            f"Fewer than {p} people" if p else "Few people", count(summary.get("fewer_than_p")), few
        ),
        Line(
            "Distinct sequences",
            count(summary.get("distinct_sequences")),
            "Different pieces of text the model completes, whoever wrote them.",
        ),
        Line(
            "Sequences in S",
            count(summary.get("sequences_in_s")),
            "The same, counting every time the model completes one.",
        ),
    ]


def _quality_lines(summary: dict[str, Any]) -> list[Line]:
    k = summary.get("top_k")
    among = "its first guess" if k == 1 else f"among its first {k} guesses"
    unmeasured = "Not measured: give --validation CORPUS to learn how well the model does on text it never saw."
    validation, accuracy = summary.get("validation_perplexity"), summary.get("validation_accuracy")
    unseen = "The same on text it was not trained on; far above the training figure means learning by heart."
    return [
        Line(
            "Perplexity",
            number(summary.get("perplexity")),
            "How surprised the model is by its training corpus; 1 is not at all.",
        ),
        Line(
            "Accuracy",
            percent(summary.get("accuracy")),
            f"Share of the corpus' tokens that were {among}.",
        ),
        Line(
            "Validation perplexity",
            number(validation),
            unmeasured if validation is None else unseen,
        ),
        Line(
            "Validation accuracy",
            percent(accuracy),
            unmeasured if accuracy is None else f"Share of unseen tokens that were {among}.",
        ),
    ]


def _corpus_line(summary: dict[str, Any]) -> Line:
    documents, tokens = count(summary.get("num_documents")), count(summary.get("num_tokens"))
    return Line(
        "People",
        count(summary.get("num_users")),
        f"They wrote {documents} documents, {tokens} tokens: the corpus D.",
    )


def _out_of(part: int | None, whole: int | None) -> str:
    if part is None:
        return UNKNOWN
    return count(part) if whole is None else f"{count(part)} of {count(whole)}"


def _curated(curated: dict[str, Any] | None) -> str:
    if not curated or all(found is None for found in curated.values()):
        return UNKNOWN
    by_t = sorted(curated.items(), key=lambda item: float(item[0]))
    return " · ".join(f"{count(found)} (t = {float(t):g})" for t, found in by_t)


def terminal_table(summary: dict[str, Any]) -> "Table":
    """The headline figures as a rich table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="bold", overflow="fold", max_width=30)
    table.add_column(style="dim", overflow="fold")
    # Text, not str: a bracket in somebody's words is no markup of ours.
    for line in summary_lines(summary):
        if line.value != UNKNOWN or line.name == "Leakage epsilon":  # one hint at what is missing
            style = "bold red" if line.sentence.startswith(INSECURE) else ""
            table.add_row(*(Text(part, style=style) for part in line))
    for note in summary.get("notes") or []:
        table.add_row(Text("Note", style="bold"), Text(""), Text(note))
    return table


SNAPSHOT_COLUMNS = ("epoch", "train ppl", "validation ppl", "unique", "longest unique", "ε_l")


def snapshot_rows(snapshots: dict[str, Any]) -> list[tuple[tuple[str, ...], bool]]:
    """Cells under `SNAPSHOT_COLUMNS` for each snapshot, and whether its validation perplexity is the best."""
    best = snapshots.get("best_validation")
    return [
        (
            (
                epoch_name(snapshot),
                number(snapshot.get("train_perplexity")),
                number(snapshot.get("validation_perplexity")),
                count(snapshot["summary"].get("unique")),
                count(
                    max(
                        (
                            int(length)
                            for length, n in (snapshot.get("unique_lengths") or {}).items()
                            if n
                        ),
                        default=0,
                    )
                ),
                number(snapshot["summary"].get("leakage_epsilon")),
            ),
            best is not None and snapshot.get("name") == best,
        )
        for snapshot in snapshots["snapshots"]
    ]


def epoch_name(snapshot: dict[str, Any]) -> str:
    """What to call a snapshot on an axis: its epoch, else its step, else its name."""
    epoch = snapshot.get("epoch")
    if epoch is not None and math.isfinite(epoch):
        return f"{epoch:g}"
    return (
        f"step {snapshot['step']}"
        if snapshot.get("step") is not None
        else str(snapshot.get("name"))
    )


def snapshots_table(snapshots: dict[str, Any]) -> "Table":
    """One line per snapshot as a rich table, the best validation perplexity marked."""
    from rich.table import Table
    from rich.text import Text

    rows = snapshot_rows(snapshots)
    # A column nobody can fill (ε_l without a public model, validation without held-out text) goes.
    shown = [
        i for i in range(len(SNAPSHOT_COLUMNS)) if any(cells[i] != UNKNOWN for cells, _ in rows)
    ]
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for i in shown:
        table.add_column(SNAPSHOT_COLUMNS[i], justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for cells, is_best in rows:
        table.add_row(
            *(Text(cells[i]) for i in shown),
            Text("← best validation") if is_best else Text(""),
            style="bold" if is_best else None,
        )
    return table


def statistics_table(statistics: dict[str, Any]) -> "Table":
    """What `tightlip prepare` found and did, one line each."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column("", justify="left")
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    for name, value, words in _statistics_lines(statistics):
        table.add_row(Text(name), Text(value), Text(words))
    for warning in statistics["warnings"]:
        table.add_row(Text("Warning", style="bold red"), Text(""), Text(warning, style="red"))
    return table


def _statistics_lines(statistics: dict[str, Any]) -> list[tuple[str, str, str]]:
    per_user, removed = statistics["documents_per_user"], statistics["removed"]
    lines = [
        ("Users", count(statistics["users"]), ""),
        (
            "Documents",
            count(statistics["documents"]),
            f"{count(statistics['documents_read'])} read",
        ),
        ("Tokens", count(statistics["tokens"]), f"{percent(statistics['unknown_share'])} unknown"),
        (
            "Documents per user",
            f"{per_user['median']:g}",
            f"median; from {count(per_user['min'])} to {count(per_user['max'])}",
        ),
        ("Repeated documents", count(statistics["duplicate_documents"]), "found in the source"),
        ("Repeated sentences", count(statistics["duplicate_sentences"]), "found in the source"),
    ]
    lines += [
        (f"Removed {name.replace('_', ' ')}", count(n), "") for name, n in removed.items() if n
    ]
    lines += [(f"Scrubbed {name}", count(n), "") for name, n in statistics["scrubbed"].items() if n]
    if statistics["skipped_rows"]:
        lines.append(("Skipped rows", count(statistics["skipped_rows"]), "unusable"))
    for split in ("train", "validation"):
        if split in statistics:
            part = statistics[split]
            lines.append(
                (
                    split.capitalize(),
                    count(part["documents"]),
                    f"documents, {count(part['tokens'])} tokens",
                )
            )
    return lines


# The report's words: numbers as people read them, the verdict, the guarantee


def longest_unique(summary: dict[str, Any]) -> int | None:
    """Tokens in the longest unique sequence, where lengths are known."""
    lengths = [
        int(length) for length, found in (summary.get("unique_by_length") or {}).items() if found
    ]
    return max(lengths, default=None)


def verdict(summary: dict[str, Any], *, num_copied: int | None = None) -> tuple[str, list[str]]:
    """The report in one sentence, then what somebody must know to weigh it."""
    unique = summary.get("unique")
    if not summary.get("distinct_sequences") and not unique:
        return (
            "This model completed nothing it was trained on.",
            [
                "Not one token of the corpus was among its predictions. An untrained model, or the wrong corpus, looks the same."
            ],
        )
    if unique is None:
        return ("How much this model gives away is not known.", [])
    if unique == 0:
        shared = f"Each of the {counted(summary['distinct_sequences'], 'sequence')} it completes was written by two people or more."
        return ("None found: this model completed no text that only one person wrote.", [shared])
    return (_unique_sentence(summary, unique), _weighing(summary, unique, num_copied))


def _unique_sentence(summary: dict[str, Any], unique: int) -> str:
    pieces = "1 piece of text" if unique == 1 else f"{count(unique)} pieces of text"
    return f"This model completes {pieces} that only one person wrote."


def _weighing(summary: dict[str, Any], unique: int, num_copied: int | None) -> list[str]:
    them, belong = ("It", "belongs") if unique == 1 else ("They", "belong")
    sentences = []
    owners, users, longest = (
        summary.get("users_with_unique"),
        summary.get("num_users"),
        longest_unique(summary),
    )
    if owners and users:
        tail = "" if longest is None else f"; the longest is {counted(longest, 'token')}"
        whose = (
            f"{count(owners)} of {counted(users, 'person', 'people')} ({percent(owners / users)})"
        )
        sentences.append(f"{them} {belong} to {whose}{tail}.")
    worst = summary.get("leakage_epsilon")
    if worst is not None and not math.isnan(worst):
        times = "far" if math.isinf(worst) else f"{number(worst)} times"
        sentences.append(
            f"The worst is {times} less surprising to this model than to the public one."
        )
    if summary.get("public_unique"):
        pieces = counted(summary["public_unique"], "such piece")
        sentences.append(
            f"The public model completes {pieces} too: if it never saw this text, some can simply be guessed."
        )
    if num_copied:
        stood = "was" if num_copied == 1 else "were"
        sentences.append(
            f"{count(num_copied)} {stood} already in front of the model when it completed them (marked “copied”)."
        )
    return sentences
