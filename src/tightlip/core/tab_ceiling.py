"""How many canaries TAB can complete at most: after one prompt there is one way on."""

from collections import defaultdict
from collections.abc import Sequence


def most_successes(pairs: Sequence[tuple[str, str]]) -> int:
    """The most canaries that can succeed at once, each given by its prompt and its text.

    Whoever types a prompt and accepts every suggestion gets one text. Of the canaries with that
    prompt it can complete those that are equal to it or begin it, and no other.

    Holds:
        together: the same as the largest set in which no two canaries of one prompt contradict
            each other.

    >>> most_successes([("My", "My ID is 1"), ("My", "My ID is 2"), ("Call", "Call me")])
    2
    >>> most_successes([("My", "My ID is 1"), ("My", "My ID is 1"), ("My", "My ID is 12")])
    3
    """
    by_prompt: dict[str, list[str]] = defaultdict(list)
    for prompt, text in pairs:
        by_prompt[prompt].append(text)
    return sum(_longest_chain(texts) for texts in by_prompt.values())


def _longest_chain(texts: Sequence[str]) -> int:
    """How many of `texts` begin, or are, one and the same text."""
    chain: list[str] = []
    longest = 0
    # Sorted, every text comes after those that begin it, and nothing foreign comes between.
    for text in sorted(texts):
        while chain and not text.startswith(chain[-1]):
            chain.pop()
        chain.append(text)
        longest = max(longest, len(chain))
    return longest
