"""The scores beside a reference, against slow oracles written from their definitions; planted truth,
and chance for models that saw neither side."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from audit.made_sides import (
    BOS,
    VOCABULARY,
    corpus_of,
    losses_one_by_one,
    random_documents,
    scan_of,
    scores_of,
    side_by,
    side_of,
)
from standins import Parrot, Stranger
from tightlip.audit import sides as fair_tokens
from tightlip.audit.membership_figures import (
    SCORES,
    about_amounts,
    best_score,
    by_length,
    halves,
    leading_score,
    measure_level,
)
from tightlip.core.errors import UsageError
from tightlip.scan import store
from tightlip.scan.store import MOMENTS

SIZES = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)
TAKE_A_REFERENCE = {"ez", "wbc", "reference", "rmia"}


class Spread(torch.nn.Module):
    """Logits looked up by the last token: no ties."""

    def __init__(self, seed, size=VOCABULARY):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.table = torch.randn(size, size, generator=draw) * 1.5

    def forward(self, input_ids):
        return type("Output", (), {"logits": self.table[input_ids]})


# Oracles, a document at a time, in Python's own floats


def told_one_by_one(model, document, bos):
    """Of every predicted token: rank, log p, and log p's mean and deviation under the model."""
    row = document if bos is None else [bos, *document]
    for place in range(1, len(row)):
        logits = model(input_ids=torch.tensor([row[:place]])).logits[0, -1].double()
        nats = logits.log_softmax(-1).tolist()
        mean = sum(math.exp(one) * one for one in nats)
        spread = math.sqrt(sum(math.exp(one) * (one - mean) ** 2 for one in nats))
        yield sum(one > nats[row[place]] for one in nats), nats[row[place]], mean, spread


def differences(model, references, document, bos):
    theirs = [losses_one_by_one(one, document, bos) for one in references]
    mine = [nats for _, nats, _, _ in told_one_by_one(model, document, bos)]
    return [
        nats + sum(loss[place] for loss in theirs) / len(theirs) for place, nats in enumerate(mine)
    ]


def kept(values, document, counted, bos):
    """The values of predicted tokens that count."""
    skipped = len(document) - len(values)
    assert skipped == (bos is None)
    return [one for one, counts in zip(values, counted[skipped:], strict=True) if counts]


def gains_and_losses(model, references, document, counted, bos):
    gaps = differences(model, references, document, bos)
    ranks = [rank for rank, _, _, _ in told_one_by_one(model, document, bos)]
    wrong = [rank >= 1 and place > 0 for place, rank in enumerate(ranks)]
    gaps, wrong = kept(gaps, document, counted, bos), kept(wrong, document, counted, bos)
    zone = [gap for gap, is_wrong in zip(gaps, wrong, strict=True) if is_wrong]
    zone = gaps if len(zone) < 2 else zone
    return sum(gap for gap in zone if gap > 0), -sum(gap for gap in zone if gap < 0)


def votes_and_windows(model, references, document, counted, bos):
    gaps = kept(differences(model, references, document, bos), document, counted, bos)
    for size in SIZES:
        width = min(size, len(gaps))
        sums = [math.fsum(gaps[at : at + width]) for at in range(len(gaps) - width + 1)]
        yield sum(one > 0 for one in sums), len(sums)


def expected_scores(model, references, documents, masks, bos):
    """All scores beside references, and min-k%++, of some documents taken together."""
    zone = [
        gains_and_losses(model, references, *one, bos) for one in zip(documents, masks, strict=True)
    ]
    gained, lost = (sum(each) for each in zip(*zone, strict=True))
    votes = [
        [*votes_and_windows(model, references, *one, bos)]
        for one in zip(documents, masks, strict=True)
    ]
    shares = [
        sum(one[number][0] for one in votes) / sum(one[number][1] for one in votes)
        for number in range(len(SIZES))
    ]
    normed, losses, others = [], [], [[] for _ in references]
    for document, counted in zip(documents, masks, strict=True):
        told = [*told_one_by_one(model, document, bos)]
        deviations = kept([(n - mean) / s for _, n, mean, s in told], document, counted, bos)
        normed += sorted(deviations)[: max(1, len(deviations) // 5)]
        losses += kept([-nats for _, nats, _, _ in told], document, counted, bos)
        for number, one in enumerate(references):
            others[number] += kept(losses_one_by_one(one, document, bos), document, counted, bos)
    means = [-np.mean(one) for one in others]
    return {
        "ez": (gained + 1) / (gained + lost + 2),
        "wbc": sum(shares) / len(shares),
        "reference": -np.mean(means) - np.mean(losses),
        "rmia": -np.mean(losses) - math.log(np.mean(np.exp(means))),
        "min_k_plus": np.mean(normed),
    }


@pytest.mark.parametrize(
    ("bos", "num_references", "masked"), [(BOS, 1, False), (None, 2, True), (BOS, 3, True)]
)
def test_every_score_is_that_of_its_definition_by_document_and_by_user(
    bos, num_references, masked, monkeypatch
):
    monkeypatch.setattr(store, "SHARD_TOKENS", 60)  # several shards
    draw = np.random.default_rng(num_references)
    documents = random_documents(14, seed=1, shortest=3, longest=50)
    users = [place % 4 for place in range(14)]
    model, *references = (Spread(seed) for seed in range(num_references + 1))
    counted = None
    masks = [[True] * len(document) for document in documents]
    if masked:
        masks = [(draw.random(len(document)) < 0.6).tolist() for document in documents]
        for mask in masks:
            mask[-1] = True  # something counts in each
        counted = np.concatenate(masks)
    scans = [scan_of(model, MOMENTS, bos), *(scan_of(one, bos=bos) for one in references)]
    side = side_by(scans, corpus_of(documents, users), users, counted=counted)
    found, by_user = scores_of(side), scores_of(side.by_user())
    for place, document in enumerate(documents):
        want = expected_scores(model, references, [document], [masks[place]], bos)
        check(found, want, place, num_references)
    for user in range(4):
        theirs = [place for place in range(14) if users[place] == user]
        want = expected_scores(
            model, references, [documents[p] for p in theirs], [masks[p] for p in theirs], bos
        )
        check(by_user, want, user, num_references)


def check(found, want, place, num_references):
    for name, value in want.items():
        if name == "rmia" and num_references == 1:
            assert found[name] is None
        else:
            assert found[name][place] == pytest.approx(value, rel=1e-4, abs=1e-4), name


def test_where_the_first_guess_is_always_right_every_token_is_in_the_error_zone():
    """Else a parrot, which is never wrong, would be nobody's."""
    documents = [[1, 2, 3, 4, 5, 6]]
    parrot = Parrot(VOCABULARY, [[BOS, *documents[0]]])
    side = side_of(parrot, documents, [0], Stranger(VOCABULARY, 0))
    assert side.reference.gained_nats[0] > 6
    assert side.reference.lost_nats[0] == 0
    assert scores_of(side)["ez"][0] > 0.85
    assert scores_of(side)["wbc"][0] == 1


def test_a_model_that_is_its_reference_has_no_votes_and_no_gain():
    documents = random_documents(5, seed=3, shortest=2)
    side = side_of(Spread(1), documents, [0] * 5, Spread(1))
    assert scores_of(side)["wbc"].tolist() == [0] * 5  # strictly more, and it is a tie
    assert scores_of(side)["ez"] == pytest.approx(0.5)


def test_with_one_reference_the_ratio_ranks_as_the_log_ratio_which_is_therefore_not_shown_twice():
    documents = random_documents(12, seed=5, shortest=4)
    side = side_of(Spread(1), documents, range(12), Spread(2), Spread(2))
    found = scores_of(side)
    assert found["rmia"] == pytest.approx(found["reference"])


def test_references_that_begin_otherwise_are_refused():
    documents = random_documents(3, seed=3, shortest=2)
    scans = [scan_of(Spread(1), MOMENTS), scan_of(Spread(2), bos=None)]
    with pytest.raises(UsageError, match="do not begin a document alike"):
        side_by(scans, corpus_of(documents), [0, 1, 2])


# Planted truth


def test_the_one_user_whom_a_model_knows_by_heart_is_the_first_of_all():
    bodies = random_documents(120, seed=7, shortest=8)
    documents = [[VOCABULARY + number, *body] for number, body in enumerate(bodies)]
    users = [place % 20 for place in range(120)]
    size = VOCABULARY + 120
    known = [[BOS, *one] for one, user in zip(documents, users, strict=True) if user == 13]
    references = Parrot(size, []), Parrot(size, [[BOS, 5, 5, 5]])
    side = side_of(Parrot(size, known), documents, users, *references)
    of_users, of_documents = scores_of(side.by_user()), scores_of(side)
    theirs = np.array(users) == 13
    for name in SCORES:
        assert np.argmax(of_users[name]) == 13, name
        if not name.startswith("min_k"):  # where one token of a text may be a surprise
            assert of_documents[name][theirs].min() > of_documents[name][~theirs].max(), name


# Chance. Words as frequent as in a language; the vocabulary, as in a run, is that of the training text.


def zipf_texts(draw, *, num_users=40, each=4, shortest=15, longest=45):
    """Of each user some texts, with favourite words of their own."""
    users = np.repeat(np.arange(num_users), each)
    texts = []
    for user in users:
        words = draw.zipf(1.3, draw.integers(shortest, longest)) % 5_000
        own = 5_000 + 7 * user + draw.integers(0, 7, 3)
        texts.append(np.concatenate([words, own]).tolist())
    return texts, users


def sides_by_frequency(draw, texts, users, is_member, *, lift=0.0, known=()):
    """Both sides by models that know how frequent words are, each in its own way, and no text.

    The model gains `lift` over the references on average; `known` are places of texts that it learnt.
    """
    frequent = Counter(
        word for text, member in zip(texts, is_member, strict=True) if member for word in text
    )
    number = {word: place + 1 for place, word in enumerate(frequent)}  # 0 is <unk>
    size = len(number) + 1
    usual = np.array([3.0, *(1.3 * math.log(word + 1) / 2 + 1 for word in number)])
    mine, *theirs = (usual + draw.normal(0, 0.7, size) for _ in range(3))
    sides = [[p for p, member in enumerate(is_member) if member is want] for want in (True, False)]
    corpora = [
        corpus_of(
            [[number.get(word, 0) for word in texts[place]] for place in places],
            [int(users[place]) for place in places],
        )
        for places in sides
    ]
    masks = fair_tokens.fair_tokens(*corpora, leaves_out_rare=False, always=[], never=[0])
    made = []
    for places, corpus, mask in zip(sides, corpora, masks, strict=True):
        learnt = np.repeat([place in known for place in places], np.diff(corpus.bounds))

        def scan(tokens, bounds, nats=mine, own=0.3 * learnt, lift=lift):
            part = slice(int(bounds[0]), int(bounds[-1]))
            log_probs = (lift + own[part] - nats[tokens[part]]).astype(np.float32)
            ranks = (draw.random(len(log_probs)) < 0.6).astype(np.int32)
            spread = 1 + 0.1 * (tokens[part] % 3)
            return ranks, log_probs, np.full_like(log_probs, -4), spread.astype(np.float32)

        def others(tokens, bounds, nats=None):
            part = slice(int(bounds[0]), int(bounds[-1]))
            return np.ones(len(tokens[part]), np.int32), -nats[tokens[part]].astype(np.float32)

        references = [
            lambda tokens, bounds, nats=nats: others(tokens, bounds, nats) for nats in theirs
        ]
        made.append(
            side_by([scan, *references], corpus, [int(users[p]) for p in places], counted=mask)
        )
    return made


def astray(make, *, level=lambda members, others: (members, others), seeds=range(20)):
    """In how many of 20 corpora each score's interval does not hold 0.5."""
    counts = Counter()
    for seed in seeds:
        draw = np.random.default_rng(seed)
        found = measure_level(*level(*make(draw)), draw, 400)["scores"]
        for name, score in found.items():
            counts[name] += not score["auc"]["low"] <= 0.5 <= score["auc"]["high"]
    assert set(counts) == {*SCORES}
    return counts


def split_within_users(draw):
    texts, users = zipf_texts(draw)
    is_member = [bool(one) for one in draw.random(len(texts)) < 0.6]
    return sides_by_frequency(draw, texts, users, is_member, lift=0.3)


def split_by_user(draw):
    texts, users = zipf_texts(draw)
    is_in = draw.permutation(40) < 24
    return sides_by_frequency(draw, texts, users, [bool(is_in[user]) for user in users], lift=0.3)


def shuffled(draw):
    """The model learnt half of the texts, and who is called a member has nothing to do with it."""
    texts, users = zipf_texts(draw)
    known = {place for place in range(len(texts)) if draw.random() < 0.5}
    is_member = [bool(one) for one in draw.random(len(texts)) < 0.6]
    return sides_by_frequency(draw, texts, users, is_member, lift=0.3, known=known)


@pytest.mark.parametrize("make", [split_within_users, split_by_user, shuffled])
def test_of_models_that_saw_neither_side_three_intervals_of_twenty_miss_chance_at_most(make):
    counts = astray(make)
    assert max(counts.values()) <= 3, counts


def test_the_same_for_whole_users():
    counts = astray(split_by_user, level=lambda one, other: (one.by_user(), other.by_user()))
    assert max(counts.values()) <= 3, counts


@pytest.mark.parametrize("kept", [1, 4])
def test_that_users_of_one_side_have_more_text_is_said(kept):
    """The more text, the further a user's EZ is from a half, whoever was trained on."""

    def made(draw):
        texts, users = zipf_texts(draw)
        places = [p for p in range(len(texts)) if users[p] < 20 or p % 4 < kept]
        texts, users = [texts[p] for p in places], users[places]
        is_member = [bool(user < 20) for user in users]
        sides = sides_by_frequency(draw, texts, users, is_member, lift=0.3)
        return [side.by_user() for side in sides]

    draw = np.random.default_rng(0)
    told = [*about_amounts(*made(draw), draw, 200)]
    if kept == 4:
        assert told == []
        return
    assert astray(made, seeds=range(6))["ez"] > 1
    assert len(told) == 1
    assert "have more text here than the others" in told[0]


def test_what_was_learnt_is_found_by_the_same_measure():
    def learnt(draw):
        texts, users = zipf_texts(draw)
        is_member = [bool(one) for one in draw.random(len(texts)) < 0.6]
        known = {place for place, member in enumerate(is_member) if member}
        return sides_by_frequency(draw, texts, users, is_member, lift=0.3, known=known)

    counts = astray(learnt, seeds=range(6))
    assert counts["ez"] == counts["wbc"] == counts["reference"] == counts["rmia"] == 6


def test_without_the_choice_of_tokens_the_vocabulary_would_be_told(monkeypatch):
    monkeypatch.setattr(fair_tokens, "fair_tokens", lambda *sides, **how: [None for _ in sides])
    counts = astray(split_within_users, seeds=range(6))
    assert counts["min_k"] == counts["loss"] == 6


def test_sides_of_other_lengths_are_nearly_alike_within_quartiles_of_length():
    """The longer a text, the further its EZ is from a half, whoever learnt it."""
    draw = np.random.default_rng(0)
    texts, users = zipf_texts(draw, num_users=150, shortest=1, longest=60)
    is_member = [bool(len(text) > draw.integers(1, 60)) for text in texts]
    sides = sides_by_frequency(draw, texts, users, is_member, lift=1.5)
    whole = measure_level(*sides, draw, 100)["scores"]["ez"]["auc"]
    assert whole["low"] > 0.55
    within = by_length(*sides, draw, 100)
    assert [one["shortest"] for one in within[1:]] > [one["longest"] for one in within[:-1]]
    assert sum(one["num_members"] for one in within) == len(sides[0])
    areas = [one["scores"]["ez"]["auc"]["value"] for one in within]
    assert max(areas) - 0.5 < (whole["value"] - 0.5) / 2


# The leading score


def test_the_leading_score_is_named_beforehand():
    assert leading_score(has_reference=True) == "ez"
    assert leading_score(has_reference=False) == "min_k"


def test_a_chosen_score_is_chosen_on_users_of_whom_nothing_is_reported():
    draw = np.random.default_rng(1)
    members, others = split_within_users(draw)
    looked_at, reported = halves(members, others, draw)
    for one, other, whole in zip(looked_at, reported, (members, others), strict=True):
        assert len(one) + len(other) == len(whole)
    mine, theirs = (
        {user for side in half for user in side.users.tolist()} for half in (looked_at, reported)
    )
    assert not mine & theirs
    assert abs(len(mine) - len(theirs)) <= 3  # each kind of user is halved by itself
    areas = {
        name: found["auc"]["value"]
        for name, found in measure_level(*looked_at, draw, 100)["scores"].items()
    }
    assert areas[best_score(*looked_at)] == max(areas.values())


def test_too_few_users_to_halve_are_refused():
    documents = random_documents(6, seed=0, shortest=3)
    sides = [side_of(Spread(1), documents, [0, 0, 1, 1, 2, 2]) for _ in range(2)]
    with pytest.raises(UsageError, match="it takes two or more in each half"):
        halves(*sides, np.random.default_rng(0))
