"""Membership: figures against slow oracles, and chance where there is nothing to tell."""

import io
import math
import zlib
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from audit.made_sides import (
    BOS,
    VOCABULARY,
    corpus_of,
    losses_one_by_one,
    random_documents,
    scan_of,
    scores_by,
    scores_of,
    side_of,
)
from standins import BigramTable, Parrot, Stranger, scanned
from tightlip.audit import sides as fair_tokens
from tightlip.audit.membership_figures import (
    RATES,
    SCORES,
    Ranking,
    Score,
    measure_level,
    unlike_the_leading,
)
from tightlip.audit.sides import Side, compressed_sizes
from tightlip.cli.measures import _membership_table
from tightlip.core.errors import UsageError
from tightlip.core.resampling import check_num_bootstraps, interval, tail_share, times_drawn
from tightlip.corpus.opening import standing_in_both
from tightlip.scan import store
from tightlip.scan.document_scores import DocumentScores, document_scores

# What a model makes of a document


@pytest.mark.parametrize("bos", [BOS, None])
def test_documents_are_scored_as_one_by_one(bos, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "SHARD_TOKENS", 40)  # several shards, some documents empty
    documents = random_documents(30, seed=1)
    model = BigramTable(VOCABULARY, seed=2)
    scan = scan_of(model, bos=bos)
    found = document_scores(scanned(scan, corpus_of(documents), tmp_path))
    for index, document in enumerate(documents):
        losses = losses_one_by_one(model, document, bos)
        worst = sorted(losses, reverse=True)[: max(1, len(losses) // 5)]
        assert found.num_tokens[index] == len(losses)
        assert found.loss_nats[index] == pytest.approx(sum(losses), rel=1e-5)
        assert found.num_lowest[index] == len(worst)
        assert found.lowest_nats[index] == pytest.approx(sum(worst), rel=1e-5)


def always(log_prob):
    """A scan that holds every token for equally likely."""

    def scan(tokens, bounds):
        size = int(bounds[-1] - bounds[0])
        return np.zeros(size, np.int32), np.full(size, log_prob, np.float32)

    return scan


def test_one_shard_of_log_probabilities_is_held_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "SHARD_TOKENS", 50)
    corpus = corpus_of(random_documents(100, seed=3))
    whole = scanned(always(-1.0), corpus, tmp_path)
    sizes, plain = [], whole.shards

    def watched():
        for shard in plain():
            sizes.append(len(shard.log_probs))
            yield shard

    found = document_scores(SimpleNamespace(corpus=corpus, shards=watched, scorer=whole.scorer))
    assert sum(sizes) == corpus.num_tokens == found.loss_nats.sum()
    assert len(sizes) > 5
    assert max(sizes) < 50 + 12


def test_a_token_held_for_impossible_is_refused(tmp_path):
    with pytest.raises(UsageError, match="impossible"):
        document_scores(scanned(always(-np.inf), corpus_of([[1, 2]]), tmp_path))


def test_a_corpus_without_documents_gives_no_scores(tmp_path):
    found = document_scores(scanned(always(-1.0), corpus_of([]), tmp_path))
    assert len(found.loss_nats) == len(found.num_lowest) == 0


def test_a_user_is_scored_as_all_their_documents_together():
    documents = random_documents(20, seed=4, shortest=1)
    users = [index % 3 for index in range(20)]
    model, reference = BigramTable(VOCABULARY, seed=5), BigramTable(VOCABULARY, seed=6)
    found = scores_of(side_of(model, documents, users, reference).by_user())
    for user in range(3):
        theirs = [documents[index] for index in range(20) if users[index] == user]
        losses = [losses_one_by_one(model, document, BOS) for document in theirs]
        other = [losses_one_by_one(reference, document, BOS) for document in theirs]
        worst = [loss for one in losses for loss in sorted(one)[-max(1, len(one) // 5) :]]
        num_tokens = sum(map(len, losses))
        total = sum(map(sum, losses))
        assert found["loss"][user] == pytest.approx(-total / num_tokens, rel=1e-5)
        assert found["min_k"][user] == pytest.approx(-np.mean(worst), rel=1e-5)
        assert found["zlib"][user] == pytest.approx(
            -total / sum(8 + len(document) for document in theirs), rel=1e-5
        )
        assert found["reference"][user] == pytest.approx(
            (sum(map(sum, other)) - total) / num_tokens, rel=1e-4
        )


# The two figures


def auc_by_pairs(members, others):
    """Oracle: compare every member with every other."""
    won = [(m > o) + (m == o) / 2 for m in members for o in others]
    return sum(won) / len(won)


def rate_by_trying(members, others, one_in):
    """Oracle: try every bar that a score could be, keep the best that accuses few enough."""
    rates = [
        sum(m > bar for m in members) / len(members)
        for bar in [*members, *others]
        if sum(o > bar for o in others) * one_in <= len(others)
    ]
    return max(rates)


@given(seed=st.integers(0, 10**9))
def test_auc_and_rate_agree_with_every_pair_and_every_bar(seed):
    draw = np.random.default_rng(seed)
    members = draw.integers(0, 9, draw.integers(1, 30)) / 4  # many ties
    others = draw.integers(0, 7, draw.integers(1, 60)) / 4
    times = draw.integers(0, 3, len(members)), draw.integers(0, 3, len(others))
    times[0][0] = times[1][0] = 1
    weighed = Ranking(members, others).weighed(*times)
    repeated = np.repeat(members, times[0]), np.repeat(others, times[1])
    assert weighed.auc() == pytest.approx(auc_by_pairs(*repeated))
    for one_in in (2, 3, 10, 100):
        assert weighed.true_positive_rate(one_in) == pytest.approx(
            rate_by_trying(*repeated, one_in)
        )


def test_auc_is_the_mann_whitney_statistic_and_scikit_learns():
    from scipy.stats import mannwhitneyu
    from sklearn.metrics import roc_auc_score

    draw = np.random.default_rng(0)
    members, others = draw.normal(0.3, 1, 200).round(1), draw.normal(0, 1, 90).round(1)
    ones = np.ones(200, int), np.ones(90, int)
    expected = mannwhitneyu(members, others).statistic / (200 * 90)
    found = Ranking(members, others).weighed(*ones).auc()
    assert found == pytest.approx(expected)
    is_member = [1] * 200 + [0] * 90
    assert found == pytest.approx(roc_auc_score(is_member, np.concatenate([members, others])))


@pytest.mark.parametrize("num_others", [100, 700, 2900, 3000])
def test_exactly_one_in_a_hundred_may_be_accused(num_others):
    others = np.arange(num_others, dtype=float)
    members = np.array([num_others - num_others // 100 - 0.5])  # that many others are above it
    ones = np.ones(1, int), np.ones(num_others, int)
    assert Ranking(members, others).weighed(*ones).true_positive_rate(100) == 1
    lower = members - 1
    assert Ranking(lower, others).weighed(*ones).true_positive_rate(100) == 0


# Intervals


def made_side(users, scores):
    """A side whose loss score is `scores`."""
    ones = np.ones(len(scores))
    model = DocumentScores(loss_nats=-scores, num_tokens=ones, lowest_nats=-scores, num_lowest=ones)
    return Side(users=users, model=model, reference=None, num_bytes=ones)


def made_sides(draw, *, lift=0.0):
    """60 users, 4 documents trained on and 2 held out each; a user's documents are much alike."""
    habits = draw.normal(0, 1, 60)
    users = np.arange(60)
    trained, held = np.repeat(users, 4), np.repeat(users, 2)
    return (
        made_side(trained, lift + habits[trained] + draw.normal(0, 0.5, 240)),
        made_side(held, habits[held] + draw.normal(0, 0.5, 120)),
    )


def split_by_user(draw):
    """The same where 20 of the 60 users are held out whole."""
    habits = draw.normal(0, 1, 60)
    users = np.repeat(np.arange(60), 4)
    scores = habits[users] + draw.normal(0, 0.5, 240)
    return made_side(users[:160], scores[:160]), made_side(users[160:], scores[160:])


def share_covered(make, *, num_cases=100, num_draws=100, as_documents=False):
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(num_cases):
        members, others = make(draw)
        if as_documents:
            members = made_side(np.arange(len(members)), scores_of(members)["loss"])
            others = made_side(1000 + np.arange(len(others)), scores_of(others)["loss"])
        auc = measure_level(members, others, draw, num_draws)["scores"]["loss"]["auc"]
        covered += auc["low"] <= 0.5 <= auc["high"]
    return covered / num_cases


def test_chance_lies_in_about_95_of_100_intervals():
    # Of 100 cases, give or take two. Of 500, each with 600 draws, it was 96.8%, and 96.6% with whole
    # users held out.
    assert share_covered(made_sides) >= 0.9


def test_whole_users_must_be_drawn_where_whole_users_were_held_out():
    assert share_covered(split_by_user) >= 0.9
    assert share_covered(split_by_user, as_documents=True) < 0.8


def one_on_either_side_only(draw):
    """20 users on both sides, and one each who is trained on or held out whole."""
    habits = draw.normal(0, 1, 22)
    trained, held = np.repeat([*range(20), 20], 20), np.repeat([*range(20), 21], 20)
    return (
        made_side(trained, habits[trained] + draw.normal(0, 1, 420)),
        made_side(held, habits[held] + draw.normal(0, 1, 420)),
    )


def test_one_user_alone_on_a_side_varies_too():
    # Drawn as a group of one it never did: 86 of 100 held 0.5, and of three users none did.
    assert share_covered(one_on_either_side_only) >= 0.9
    draw = np.random.default_rng(0)
    members, others = (made_side(np.array(one), draw.normal(size=4)) for one in ([0, 0, 1, 1], [0, 0, 2, 2]))  # fmt: skip
    auc = measure_level(members, others, draw, 100)["scores"]["loss"]["auc"]
    assert auc["low"] < auc["value"] < auc["high"]


def test_what_is_there_is_seen():
    members, others = made_sides(np.random.default_rng(2), lift=1.0)
    auc = measure_level(members, others, np.random.default_rng(0), 200)["scores"]["loss"]["auc"]
    assert 0.5 < auc["low"] < auc["value"] < auc["high"] < 1


def level_of(**areas):
    titles = {name: SCORES[name].title for name in SCORES}
    ends = {
        name: dict(zip(("low", "value", "high"), area, strict=True)) for name, area in areas.items()
    }
    scores = {
        name: ends.get(name) and {"title": titles[name], "auc": ends[name]} for name in SCORES
    }
    return {"scores": scores}


def test_another_score_that_tells_and_a_leading_one_below_chance_are_said():
    flat, high, low = (0.45, 0.5, 0.55), (0.9, 0.93, 0.95), (0.1, 0.2, 0.3)

    def said(**areas):
        leading = "ez" if "ez" in areas else "min_k"
        return [*unlike_the_leading(level_of(**areas), leading, "users")]

    (line,) = said(ez=flat, reference=flat, loss=high, min_k=flat)
    assert "The loss score tells users where EZ does not. Do not call them safe" in line
    assert "reference may itself know the members" in line
    (line,) = said(ez=low, reference=flat, min_k=flat)
    assert line.startswith("The EZ score of users is below chance: the reference may itself know")
    (line,) = said(min_k=flat, loss=high)
    assert "The loss score tells users where min-k% does not" in line
    assert "reference" not in line
    (line,) = said(ez=(0.43, 0.87, 1.0), reference=(0.75, 0.93, 1.0))
    assert "The reference score tells users where EZ does not" in line, "of few users, too"
    assert said(ez=flat, reference=(0.51, 0.6, 0.7)) == [], "one of two strays so far by chance"
    assert said(ez=(0.51, 0.55, 0.6), reference=high) == [], "EZ tells them itself"
    assert said(min_k=(None, 0.5, None), loss=(None, 1.0, None)) == [], "no intervals"


def test_one_who_stands_out_is_counted_where_the_average_tells_nothing():
    draw = np.random.default_rng(5)
    for members in (draw.normal(size=30), np.append(draw.normal(size=29), 1e6), np.ones(30)):
        others = draw.normal(size=30) if members[0] != 1 else np.ones(30)
        sides = made_side(np.arange(30), members), made_side(np.arange(30, 60), others)
        found = measure_level(*sides, np.random.default_rng(0), 100)["scores"]["min_k"]
        assert found["num_above_all_nonmembers"] == sum(m > max(others) for m in members)


def test_the_same_seed_gives_the_same_figures():
    sides = made_sides(np.random.default_rng(3))
    one, two, other = (
        measure_level(*sides, np.random.default_rng(seed), 100) for seed in (0, 0, 1)
    )
    assert one == two != other


def test_few_users_go_further_into_the_tails():
    # Hesterberg 2015: with t for n - 1 degrees and sqrt(n/(n - 1)), as for a mean.
    from scipy.stats import norm, t

    for n in (3, 5, 12, 400):
        expected = norm.cdf(-math.sqrt(n / (n - 1)) * t.ppf(0.975, n - 1))
        assert tail_share(n) == pytest.approx(expected)
    assert tail_share(4) < tail_share(40) < 0.025
    draws = np.random.default_rng(0).normal(size=4000)
    few, many = (interval(0.0, draws, num_users=n) for n in (5, 500))
    assert few["low"] < many["low"] < 0 < many["high"] < few["high"]


def test_each_group_is_drawn_from_itself():
    groups = [np.array([0, 2]), np.array([1, 3, 4])]
    drawn = [times_drawn(np.random.default_rng(seed), groups, 5) for seed in range(50)]
    assert {(one[[0, 2]].sum(), one[[1, 3, 4]].sum()) for one in drawn} == {(2, 3)}
    assert len({tuple(one) for one in drawn}) > 5


def test_too_few_draws_are_refused():
    with pytest.raises(UsageError, match="num_bootstraps=20"):
        check_num_bootstraps(20)


def test_a_rate_needs_others_of_whom_two_may_be_accused():
    draw = np.random.default_rng(4)
    members = made_side(np.arange(50), draw.normal(size=50))
    for num_others in (199, 200, 1999, 2000):
        others = made_side(100 + np.arange(num_others), draw.normal(size=num_others))
        found = measure_level(members, others, draw, 100)["scores"]["loss"]
        for name, one_in in RATES.items():
            assert (found[name] is None) == (num_others < 2 * one_in)


# Parrots and strangers


@pytest.fixture(scope="module")
def texts():
    """Documents of 40 users, half of each trained on; no two begin alike."""
    bodies = random_documents(400, seed=7, shortest=10)
    documents = [[VOCABULARY + number, *body] for number, body in enumerate(bodies)]
    users = [index % 40 for index in range(400)]
    return (documents[:200], users[:200]), (documents[200:], users[200:])


def test_a_parrot_gives_its_documents_away(texts):
    (trained, owners), (held, others) = texts
    model = Parrot(VOCABULARY + 400, [[BOS, *document] for document in trained])
    stranger = Stranger(VOCABULARY + 400, BOS - 1)
    level = measure_level(
        side_of(model, trained, owners, stranger),
        side_of(model, held, others, stranger),
        np.random.default_rng(0),
        100,
    )
    assert level["num_members"] == level["num_nonmembers"] == 200
    for name in SCORES:
        if name == "rmia":
            assert level["scores"][name] is None, "it takes several references"
            continue
        assert level["scores"][name]["auc"]["low"] > 0.98
        assert level["scores"][name]["tpr_at_1_percent_fpr"]["value"] > 0.9
        assert level["scores"][name]["tpr_at_0_1_percent_fpr"] is None


def test_a_stranger_gives_away_nothing(texts):
    (trained, owners), (held, others) = texts
    model = BigramTable(VOCABULARY + 400, seed=8)
    level = measure_level(
        side_of(model, trained, owners), side_of(model, held, others), np.random.default_rng(0), 400
    )
    beside = {"reference", "ez", "wbc", "rmia"}
    assert {name for name, found in level["scores"].items() if found is None} == beside
    for name in {*SCORES} - beside:
        auc = level["scores"][name]["auc"]
        assert auc["low"] <= 0.5 <= auc["high"]


def test_a_model_to_which_all_is_alike_is_at_chance_exactly(texts):
    (trained, owners), (held, others) = texts
    model = Stranger(VOCABULARY + 400, BOS - 1)
    level = measure_level(
        side_of(model, trained, owners), side_of(model, held, others), np.random.default_rng(0), 100
    )
    found = level["scores"]["min_k"]
    assert found["auc"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert found["tpr_at_1_percent_fpr"]["value"] == 0


# Words that training brought into the vocabulary


def counts_one_by_one(train, held, *, leaves_out_rare, min_users, always, never):
    """Oracle: count training anew without the user, for every document."""
    everything = Counter(token for document in train[0] for token in document)
    rarest = min(n for w, n in everything.items() if w not in {*always, *never})
    needed = rarest + 1 if leaves_out_rare else 1

    def counts(document, user):
        theirs = [(d, u) for d, u in zip(*train, strict=True) if u != user]
        rest = Counter(token for other, _ in theirs for token in other)
        writers = Counter(token for _, token in {(u, token) for d, u in theirs for token in d})
        return [
            w in always or (w not in never and rest[w] >= needed and writers[w] >= min_users)
            for w in document
        ]

    return [
        [one for document, user in zip(*part, strict=True) for one in counts(document, user)]
        for part in (train, held)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_fair_tokens_agree_with_leaving_each_user_out(seed, monkeypatch):
    monkeypatch.setattr(fair_tokens, "_TOGETHER", 30)
    draw = np.random.default_rng(seed)
    train, held = (
        (
            [(draw.geometric(0.08, draw.integers(0, 9)) - 1).tolist() for _ in range(size)],
            draw.integers(0, num_users, size).tolist(),
        )
        for size, num_users in ((25, 6), (9, 8))  # some held-out users wrote nothing in training
    )
    how = {
        "min_users": 1 + seed % 2,
        "leaves_out_rare": seed % 4 > 1,
        "always": [3, 40],
        "never": [0, 1],
    }
    found = fair_tokens.fair_tokens(corpus_of(*train), corpus_of(*held), **how)
    expected = counts_one_by_one(train, held, **how)
    assert found[0].tolist() == expected[0]
    assert found[1].tolist() == expected[1]


def test_a_users_word_counts_in_training_and_in_held_out_text_or_in_neither():
    """Three documents a user, one held out: a word of theirs stands in the other two or not."""
    draw = np.random.default_rng(0)
    rows = [
        (user, [*draw.integers(1, 40, 20), *draw.integers(50 + 4 * user, 54 + 4 * user, 4)])
        for user in range(100)
        for _ in range(3)
    ]
    train, held = (
        [row for place, row in enumerate(rows) if (place % 3 < 2) is kept] for kept in (True, False)
    )
    known = {int(word) for _, document in train for word in document}
    sides = [
        corpus_of(
            [[int(w) if int(w) in known else 0 for w in d] for _, d in part], [u for u, _ in part]
        )
        for part in (train, held)
    ]
    masks = fair_tokens.fair_tokens(*sides, leaves_out_rare=False, always=[], never=[0])
    shares = [float(mask[side.tokens > 49].mean()) for mask, side in zip(masks, sides, strict=True)]
    assert shares == [0, 0]  # nobody else wrote these words
    nats = np.where(np.arange(500) > 49, 9.0, 3.0)  # a model that saw neither side

    def scan(tokens, bounds):
        here = tokens[bounds[0] : bounds[-1]]
        return np.zeros(len(here), np.int32), -nats[here].astype(np.float32)

    made = []
    for side, mask in zip(sides, masks, strict=True):
        one = scores_by(scan, side, counted=mask)
        made.append(made_side(np.asarray(side.users), -one.loss_nats / one.num_tokens))
    auc = measure_level(*made, np.random.default_rng(0), 200)["scores"]["loss"]["auc"]
    assert auc == {"value": 0.5, "low": 0.5, "high": 0.5}


@pytest.mark.parametrize("size", [400, 10_000])
def test_a_vocabulary_from_training_does_not_move_chance(size):
    """Words as frequent as in a language, a model that knows these frequencies and no text."""
    draw = np.random.default_rng(5)
    texts = [draw.zipf(1.3, draw.integers(15, 30)) % 20_000 for _ in range(600)]
    trained, held = texts[:450], texts[450:]
    frequent = Counter(int(word) for text in trained for word in text).most_common(size)
    number = {word: place + 1 for place, (word, _) in enumerate(frequent)}  # 0 is <unk>
    sides = [
        corpus_of([[number.get(int(word), 0) for word in text] for text in part])
        for part in (trained, held)
    ]
    nats = np.array([2.0, *(1.3 * math.log(word + 1) for word in number)])

    def auc(masks):
        def scan(tokens, bounds):
            here = tokens[bounds[0] : bounds[-1]]
            return np.zeros(len(here), np.int32), -nats[here].astype(np.float32)

        scored = [
            scores_by(scan, corpus, counted=mask) for corpus, mask in zip(sides, masks, strict=True)
        ]
        made = [
            made_side(1000 * place + np.arange(len(one.loss_nats)), -one.loss_nats / one.num_tokens)
            for place, one in enumerate(scored)
        ]
        return measure_level(*made, np.random.default_rng(0), 200)["scores"]["loss"]["auc"]

    how = {"leaves_out_rare": len(number) == size, "always": [], "never": [0]}
    assert auc([None, None])["high"] < 0.45
    fair = auc(fair_tokens.fair_tokens(*sides, **how))
    assert fair["low"] <= 0.5 <= fair["high"]


# Documents on both sides


def test_what_stands_in_both_is_found_token_for_token():
    one = corpus_of([[1, 2], [3], [1, 2], [2, 1], []])
    other = corpus_of([[2, 1], [1], [1, 2, 3], [1, 2]])
    in_one, in_other = standing_in_both(one, other)
    assert in_one.tolist() == [True, False, True, True, False]
    assert in_other.tolist() == [True, False, False, True]


def test_sizes_are_those_of_zlib_and_unwanted_texts_are_marked():
    texts = ["a b c", "ä" * 500, "", "My ID is 12"]
    sizes, unwanted = compressed_sizes(texts, frozenset({"My ID is 12"}))
    assert sizes.tolist() == [len(zlib.compress(text.encode())) for text in texts]
    assert unwanted.tolist() == [False, False, False, True]
    assert sizes[1] < 100  # compressed, not counted


def test_another_score_is_another_row_of_the_table(monkeypatch):
    """A score that knows who is a member, and that nothing but the table has heard of."""
    seer = Score(title="seer", values=lambda side: (side.users < 20).astype(float))
    monkeypatch.setitem(SCORES, "seer", seer)
    sides = [made_side(first + np.arange(20), np.zeros(20)) for first in (0, 1000)]
    level = measure_level(*sides, np.random.default_rng(0), 100)
    assert level["scores"]["seer"]["auc"]["value"] == 1
    assert level["scores"]["loss"]["auc"]["value"] == 0.5
    found = {"documents": level, "users": None, "not_counted": {}, "notes": []}
    table = Console(file=io.StringIO(), width=200)
    table.print(_membership_table(found))
    assert "seer" in table.file.getvalue()
