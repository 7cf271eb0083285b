from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tightlip.audit.canaries.tab_attack import most_successes, tab_ceiling


def by_trying_every_set(pairs):
    """Oracle: the largest set without two canaries that one way on cannot both complete."""

    def agree(one, other):
        return one[0] != other[0] or one[1].startswith(other[1]) or other[1].startswith(one[1])

    sizes = [
        size
        for size in range(len(pairs) + 1)
        for chosen in combinations(pairs, size)
        if all(agree(one, other) for one, other in combinations(chosen, 2))
    ]
    return max(sizes)


@given(draw=st.randoms())
def test_together_it_is_the_largest_set_without_a_contradiction(draw):
    pairs = []
    for _ in range(draw.randint(0, 8)):
        prompt = draw.choice("xy")
        pairs.append((prompt, prompt + "".join(draw.choices("ab", k=draw.randint(0, 3)))))
    assert most_successes(pairs) == by_trying_every_set(pairs)


def test_two_people_with_one_text_can_both_be_completed():
    assert most_successes([("My", "My ID is 7"), ("My", "My ID is 7")]) == 2


def test_many_texts_of_one_prompt_take_no_time_that_grows_with_their_pairs():
    pairs = [("My", f"My ID is {number:06}") for number in range(50_000)]
    assert most_successes(pairs) == 1


def entry(text, ids, num_prompt_tokens=1):
    words = {"prompt": text.split()[0], "text": text}
    return words | {"token_ids": ids, "num_prompt_tokens": num_prompt_tokens}


def test_the_ceiling_goes_by_tokens_not_by_letters():
    joined = [entry("ID 1", [5, 21]), entry("ID 12", [5, 37]), entry("ID 123", [5, 37, 3])]
    assert tab_ceiling(joined) == 2  # "12" is no "1" with more behind it
    apart = [entry("ID 1", [5, 21]), entry("IDs 2", [6, 22])]
    assert tab_ceiling([one | {"prompt": "ID"} for one in apart]) == 2
    before = [{"prompt": "ID", "text": text} for text in ("ID 1", "ID 12")]
    assert tab_ceiling(before) == 2  # of earlier versions, whose tokens nobody knows
