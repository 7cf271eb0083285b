"""A leakage report in words: its verdict, its headline figures, and what training longer did."""

import math
from typing import Any, NamedTuple

from tightlip.core.figures import UNKNOWN, count, counted, guarantee_words, number, percent

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
    longest = longest_of(summary.get("unique_by_length"))
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


def longest_of(num_by_length: dict[str, int] | None) -> int | None:
    """Tokens in the longest sequence of a tally by length, where there is one."""
    lengths = [int(length) for length, num in (num_by_length or {}).items() if num]
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
        longest_of(summary.get("unique_by_length")),
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


def is_best(snapshot: dict[str, Any], snapshots: dict[str, Any]) -> bool:
    """Whether a snapshot's validation perplexity is the lowest."""
    best = snapshots.get("best_validation")
    return best is not None and snapshot.get("name") == best


def story(snapshots: dict[str, Any]) -> str:
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
