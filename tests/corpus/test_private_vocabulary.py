"""Private vocabularies: what one user can change, what noise there is, and what gets out.

The bounds are those of the proof in private_vocabulary.py; their truth comes from closed forms,
dictionaries and many draws.
"""

import json
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from by_hand import unlisted
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.grid_gaussian import GridGaussian
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.private_vocabulary import (
    VocabularyRelease,
    bounded_sums,
    build_private_tokenizer,
    release_threshold,
    released_words,
)
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import DIGITS, SPECIAL_TOKENS

QUIET = VocabularyRelease(noise_multiplier=1e-9)
PUBLIC = [*SPECIAL_TOKENS, *DIGITS]


def tokens_of(tokenizer):
    return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))


def word(number):
    """A word of letters for each number."""
    return "w" + "".join(chr(97 + int(digit)) for digit in str(number))


def everyone(*users):
    """What `bounded_sums` takes, from each user's word counts."""
    return [
        (np.array([*counts], np.int64), np.array([*counts.values()], np.int64)) for counts in users
    ]


# The threshold


def chance_that_one_passes(release, threshold, num_own, num_given):
    """Closed form: one of `num_own` words of weight 1/√num_given, alone with its noise, passes."""
    gap = (threshold - 1 / math.sqrt(num_given)) / release.noise_multiplier
    passes = 0.5 * math.erfc(gap / math.sqrt(2))
    return -math.expm1(num_own * math.log1p(-passes))


releases = st.builds(
    VocabularyRelease,
    noise_multiplier=st.floats(0.05, 50),
    words_per_user=st.integers(1, 400),
    delta=st.floats(-12, -0.1).map(lambda exponent: 10**exponent),
)


@settings(max_examples=80, deadline=None)
@given(release=releases)
@example(release=VocabularyRelease(noise_multiplier=0.05, words_per_user=400, delta=1e-7))
def test_a_users_own_words_pass_with_probability_delta_and_not_less(release):
    threshold = release_threshold(release)
    chances = [
        chance_that_one_passes(release, threshold, number, number)
        for number in range(1, release.words_per_user + 1)
    ]
    assert max(chances) == pytest.approx(release.delta, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(release=releases, data=st.data())
def test_words_shared_with_others_make_a_users_own_no_likelier(release, data):
    num_given = data.draw(st.integers(1, release.words_per_user))
    num_own = data.draw(st.integers(1, num_given))
    threshold = release_threshold(release)
    assert (
        chance_that_one_passes(release, threshold, num_own, num_given) <= release.delta * 1.000001
    )


def at_most(rate, num_draws):
    """A count that Binomial(num_draws, rate) exceeds once in 100,000 times (Gaussian tail)."""
    return num_draws * rate + 4.3 * math.sqrt(num_draws * rate * (1 - rate))


@pytest.mark.parametrize(("noise", "num_words"), [(0.1, 1), (1.0, 1), (1.0, 30), (3.0, 30)])
def test_a_new_users_own_words_get_out_as_rarely_as_promised(noise, num_words):
    release = VocabularyRelease(noise_multiplier=noise, words_per_user=30, delta=0.05)
    draw, num_draws, source = np.random.default_rng(7), 4000, GridGaussian(insecure_seed=7)
    others = [{0: 1, 1: 3}] * 20
    own = {2 + number: 1 for number in range(num_words)}
    out = 0
    for _ in range(num_draws):
        sums = bounded_sums(everyone(*others, own), 40, 30, draw)
        out += (released_words(sums, release, draw, source) >= 2).any()
    assert out <= at_most(release.delta, num_draws)
    if num_words == (1 if noise < 1 else 30):  # where the bound is reached, it is reached
        assert out >= 2 * num_draws * release.delta - at_most(release.delta, num_draws)


def test_a_word_that_nobody_gave_never_gets_out():
    # Were every word of the corpus a candidate, a user with many words would have many chances.
    release = VocabularyRelease(noise_multiplier=1.0, words_per_user=1, delta=0.999)
    draw, sums = np.random.default_rng(0), np.zeros(1000)
    sums[3] = 1.0
    for _ in range(50):
        assert set(released_words(sums, release, draw)) <= {3}


# The noise


def excess_rate(release, sums, source, num_draws):
    draw = np.random.default_rng(0)
    return np.mean(
        [len(released_words(sums, release, draw, source)) == 1 for _ in range(num_draws)]
    )


class Louder(GridGaussian):
    """Noise that is off by a factor."""

    def __init__(self, factor):
        super().__init__(insecure_seed=5)
        self._factor = factor

    def add(self, sums, *, scale):
        super().add(sums, scale=scale * self._factor)


def standardised_spread(draw, noise):
    """z of the sample variance, read from how often a word one σ above or below passes."""
    release = VocabularyRelease(noise_multiplier=noise, words_per_user=5)
    threshold, num_draws = release_threshold(release), 4000
    above = excess_rate(release, np.array([threshold + noise]), draw, num_draws)
    below = excess_rate(release, np.array([threshold - noise]), draw, num_draws)
    expected = math.erf(1 / math.sqrt(2))  # P(|Z| < 1), as passing above minus passing below
    tail = (1 - expected) / 2
    return (above - below - expected) / math.sqrt(2 * tail * (1 - tail) / num_draws)


@pytest.mark.parametrize("noise", [0.3, 4.0])
@pytest.mark.parametrize(("factor", "is_right"), [(1, True), (1 / 1.5, False), (1.5, False)])
def test_the_noise_has_the_scale_it_says(noise, factor, is_right):
    assert (abs(standardised_spread(Louder(factor), noise)) < 4) == is_right


def test_every_word_gets_noise_of_its_own():
    release = VocabularyRelease(noise_multiplier=1.0, words_per_user=5)
    sums = np.full(2, release_threshold(release))
    draw = np.random.default_rng(1)
    source = GridGaussian(insecure_seed=1)
    outcomes = Counter(
        tuple(sorted(released_words(sums, release, draw, source))) for _ in range(2000)
    )
    assert set(outcomes) == {(), (0,), (1,), (0, 1)}
    assert max(outcomes.values()) <= at_most(0.25, 2000)


def test_the_larger_noisy_sum_comes_first():
    sums = np.array([30.0, 10.0, 50.0, 40.0])
    assert released_words(sums, QUIET, np.random.default_rng(0)).tolist() == [2, 3, 0, 1]
    loud = VocabularyRelease(noise_multiplier=100.0, words_per_user=1, delta=0.9)
    firsts = {tuple(released_words(sums, loud, np.random.default_rng(n))[:1]) for n in range(60)}
    assert len(firsts) > 3


# What one user can change


users = st.dictionaries(st.integers(0, 49), st.integers(1, 9), max_size=50)


@settings(max_examples=100, deadline=None)
@given(
    others=st.lists(users, max_size=6),
    user=users,
    words_per_user=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_one_user_more_moves_the_sums_by_at_most_one(others, user, words_per_user, seed):
    without, alone, together = (
        bounded_sums(everyone(*some), 50, words_per_user, np.random.default_rng(seed))
        for some in (others, [user], [*others, user])
    )
    moved = together - without
    assert np.linalg.norm(moved) <= 1 + 1e-9
    assert np.count_nonzero(np.abs(moved) > 1e-12) == min(len(user), words_per_user)
    assert np.linalg.norm(alone) == pytest.approx(1.0 if user else 0.0)
    assert not np.abs(moved[[number for number in range(50) if number not in user]]).any()


def test_a_user_of_5000_words_weighs_no_more_than_one_of_one():
    wordy = {number: 1 + number % 7 for number in range(5000)}
    sums = bounded_sums(everyone(wordy), 5000, 1000, np.random.default_rng(0))
    assert np.linalg.norm(sums) == pytest.approx(1)
    assert np.count_nonzero(sums) == 1000
    assert sums.max() == pytest.approx(1 / math.sqrt(1000))


def test_a_user_gives_the_words_that_user_wrote_most_whatever_others_write():
    user, others = {0: 1, 1: 5, 2: 9, 3: 1, 4: 7}, [{0: 100, 3: 100}] * 50
    sums = bounded_sums(everyone(*others, user), 5, 3, np.random.default_rng(0))
    share, half = 1 / math.sqrt(3), 50 / math.sqrt(2)
    assert sums == pytest.approx([half, share, share, half, share])


def test_chance_decides_evenly_among_words_written_equally_often():
    draw, num_draws = np.random.default_rng(2), 2000
    chosen = Counter()
    for _ in range(num_draws):
        sums = bounded_sums(everyone({0: 4, 1: 1, 2: 1, 3: 1, 4: 1}), 5, 2, draw)
        chosen.update(np.flatnonzero(sums).tolist())
    assert chosen[0] == num_draws
    assert max(chosen[number] for number in range(1, 5)) <= at_most(0.25, num_draws)


def given_by_hand(documents, words_per_user):
    """Oracle: every user's counts in a dictionary; only for users without ties at the cut."""
    counts = defaultdict(Counter)
    for user, text in documents:
        counts[user].update(text.split())
    sums = Counter()
    for own in counts.values():
        kept = own.most_common(words_per_user)
        for one, _ in kept:
            sums[one] += 1 / math.sqrt(len(kept))
    return sums


@pytest.mark.parametrize("unsorted", [4_000_000, 3])
def test_users_are_counted_across_scattered_documents(monkeypatch, unsorted):
    monkeypatch.setattr("tightlip.corpus.vocabulary.Tallies._UNSORTED", unsorted)
    # Everyone writes word(m) in every 2^m-th document: no two words equally often.
    documents = [
        (f"u{user}", " ".join(word(number) for number in range(8) if turn % 2**number == 0))
        for turn in range(256)
        for user in range(40)
    ]
    sums = given_by_hand(documents, 3)
    tokenizer = build_private_tokenizer(
        open_corpus(documents), VocabularyRelease(noise_multiplier=1e-9, words_per_user=3)
    )
    released = tokens_of(tokenizer)[len(SPECIAL_TOKENS) : -len(DIGITS)]
    assert sorted(released) == sorted(one for one, total in sums.items() if total > 1.001)
    assert sorted(released) == [word(0), word(1), word(2)]


# The vocabulary


COMMON = [word(number) for number in range(6)]
# Each user has a word of its own, and common words that fewer and fewer users write.
DOCUMENTS = [
    (f"u{user}", " ".join([f"own{word(user)}", "7", *COMMON[: 1 + user % 6]]))
    for user in range(60)
    for _ in range(2)
]


def test_common_words_get_out_and_nobodys_own():
    tokens = tokens_of(build_private_tokenizer(open_corpus(DOCUMENTS), QUIET))
    assert tokens == [*SPECIAL_TOKENS, *COMMON, *DIGITS]


def test_the_size_keeps_the_largest():
    tokens = tokens_of(build_private_tokenizer(open_corpus(DOCUMENTS), QUIET, size=16))
    assert tokens == [*SPECIAL_TOKENS, *COMMON[:2], *DIGITS]
    with pytest.raises(UsageError, match="Use 15 or more"):
        build_private_tokenizer(open_corpus(DOCUMENTS), QUIET, size=14)


def test_digits_take_no_weight_from_words():
    # Three users give nothing but this one word, so it weighs 3; with the digits it would weigh 0.9.
    documents = [(user, "0 1 2 3 4 5 6 7 8 9 hello") for user in "abc"]
    release = VocabularyRelease(noise_multiplier=0.25, words_per_user=11, delta=1e-3)
    assert 0.9 < release_threshold(release) < 3 - 4 * 0.25
    assert "hello" in tokens_of(build_private_tokenizer(open_corpus(documents), release))


def test_much_noise_leaves_what_is_public():
    release = VocabularyRelease(noise_multiplier=1e6)
    assert tokens_of(build_private_tokenizer(open_corpus(DOCUMENTS), release)) == PUBLIC


@pytest.mark.parametrize("text", ["", "<unk>", "1 2 3"])
def test_texts_without_words_give_what_is_public(text):
    assert tokens_of(build_private_tokenizer(open_corpus([("a", text)]), QUIET)) == PUBLIC


def test_every_vocabulary_is_drawn_anew():
    release = VocabularyRelease(noise_multiplier=5.0, words_per_user=6, delta=0.9)
    drawn = {
        tuple(tokens_of(build_private_tokenizer(open_corpus(DOCUMENTS), release)))
        for _ in range(12)
    }
    assert len(drawn) > 1


# Through prepare


EXACT = PrepareConfig(split="none")
CONFIG = PrepareConfig(split="none", vocabulary_noise=1e-9)


def test_prepare_records_the_release_and_trains_on_its_words(tmp_path):
    prepared = prepare(DOCUMENTS, tmp_path / "p", CONFIG)
    (release,) = prepared.releases
    assert json.loads((tmp_path / "p/prepared.json").read_text())["releases"] == [release]
    assert (release["name"], release["unit"]) == ("vocabulary", "user")
    assert (release["noise_multiplier"], release["delta"]) == (1e-9, 1e-7)
    assert release["example_noise_multiplier"] == pytest.approx(1e-9 / math.sqrt(2))
    assert release["words_per_user"] == 1000
    assert tokens_of(AutoTokenizer.from_pretrained(prepared.tokenizer_folder)) == [
        *SPECIAL_TOKENS,
        *COMMON,
        *DIGITS,
    ]
    unknown = prepared.train.tokens == 1
    assert unknown.sum() == len(DOCUMENTS)  # each document's own word


def test_the_tokenizer_files_tell_nothing_but_words_and_their_order(tmp_path):
    # Other counts, other users and other words of their own: the same files.
    more = [(f"{user} again", text.replace("own", "other") * 3) for user, text in DOCUMENTS]
    for name, documents in (("one", DOCUMENTS), ("two", DOCUMENTS + more)):
        prepare(documents, tmp_path / name, CONFIG)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "tokenizer").iterdir()}
        for name in ("one", "two")
    )
    assert one == two


def test_the_same_command_again_draws_nothing(tmp_path, monkeypatch):
    prepare(DOCUMENTS, tmp_path / "p", CONFIG)

    def never():
        raise AssertionError("drawn again")

    monkeypatch.setattr("tightlip.corpus.private_vocabulary.keyed_generator", never)
    assert (
        prepare(DOCUMENTS, tmp_path / "p", CONFIG).releases
        == open_prepared(tmp_path / "p").releases
    )
    with pytest.raises(UsageError, match=r"other settings \(vocabulary_noise\)"):
        prepare(DOCUMENTS, tmp_path / "p", PrepareConfig(split="none", vocabulary_noise=2.0))


def test_without_noise_nothing_is_released(tmp_path):
    assert prepare(DOCUMENTS, tmp_path / "p", EXACT).releases == []


def test_a_folder_from_before_releases_opens_and_is_found_again(tmp_path):
    prepare(DOCUMENTS, tmp_path / "p", EXACT)
    path = tmp_path / "p/prepared.json"
    record = json.loads(path.read_text())
    del record["releases"]
    for name in ("vocabulary_noise", "vocabulary_words_per_user", "vocabulary_delta"):
        del record["settings"][name]
    unlisted(path).write_text(json.dumps(record))
    assert open_prepared(tmp_path / "p").releases == []
    assert prepare(DOCUMENTS, tmp_path / "p", EXACT).releases == []


def test_much_noise_is_warned_about_and_not_refused(tmp_path):
    documents = [(user, text.replace("7", "")) for user, text in DOCUMENTS]
    config = PrepareConfig(split="none", vocabulary_noise=1e6)
    prepared = prepare(documents, tmp_path / "p", config)
    assert prepared.statistics["train"]["unknown_share"] == 1
    assert "100% of train's tokens are <unk>: too few users" in prepared.statistics["warnings"][0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"vocabulary_noise": 0.0}, "vocabulary_noise=0.0 is no noise"),
        ({"vocabulary_noise": -1.0}, "Use a number above 0"),
        ({"vocabulary_noise": math.nan}, "vocabulary_noise=nan"),
        ({"vocabulary_noise": math.inf}, "vocabulary_noise=inf"),
        ({"vocabulary_words_per_user": 0}, "Use 1 or more"),
        ({"vocabulary_delta": 0.0}, "far below 1 over the number of users"),
        ({"vocabulary_delta": 1.0}, "no probability between 0 and 1"),
        ({"vocabulary_delta": math.nan}, "vocabulary_delta=nan"),
        ({"vocabulary": "bpe"}, "Use vocabulary='words'"),
        ({"tokenizer": "t"}, "Leave one of them out"),
        ({"min_users": 3}, "Leave min_users out"),
        ({"vocabulary_noise": None, "vocabulary_delta": 1e-9}, "Add vocabulary_noise"),
        ({"vocabulary_noise": None, "vocabulary_words_per_user": 9}, "Add vocabulary_noise"),
    ],
)
def test_settings_that_cannot_be_private_are_refused_at_once(wrong, says):
    with pytest.raises(UsageError, match=says):
        PrepareConfig(**{"vocabulary_noise": 1.0, **wrong})


@pytest.mark.parametrize("deduplicate", ["sentences", "documents"])
def test_duplicates_across_users_break_the_guarantee(deduplicate):
    with pytest.raises(GuaranteeError, match="decide what is left of another's"):
        PrepareConfig(vocabulary_noise=1.0, deduplicate=deduplicate)
