"""Who wrote a sequence as text, and which sequences are one leak: against plain Python over texts."""

import random
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tightlip
from audit.leakage.test_counting import corpus_of, sequences_of, shards_of
from oracle import occurrences
from standins import BigramTable
from tightlip.audit.leakage import by_text, counting
from tightlip.audit.leakage.by_text import links_in_shard
from tightlip.audit.leakage.words import placed_words, words_of
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import GRUConfig, GRUForCausalLM

ALONE = (
    *("CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA"),
    *("THAI ", "LAO ", "KHMER ", "MYANMAR "),
)
PIECES = [
    *["33", "333", "1337", "13", "3 3", "33x", "_33_", "a", "ab", "b", "AB", "the", "The cat"],
    *[
        "straße",
        "STRASSE",
        "ﬁrst",
        "first",
        "e\u0301te\u0301",
        "été",
        "q\u0323\u0301",
        "½",
        "…",
        "１３",
    ],
    *[
        "漢字",
        "字",
        "かな",
        "ガ",
        "ｶﾞ",
        "ไทย",
        "ที่นี่",
        "ລາວ",
        "ខ្មែរ",
        "မြန်",
        "नमस्ते",
        "한글",
        "\u1112\u1161\u11ab",
    ],
    *["👍🏽", "--", "\u00a0", ".", "ǰ", "İ", "ſ"],
    *["so\u00adft", "\u200b", "wo\u200d\u2060rd", "\ufeff", "漢\u200b字"],
]
UNSEEN = {"\u00ad", "\ufeff"} | {
    chr(code)
    for name in ("200b-200f", "202a-202e", "2060-2064")
    for code in range(int(name[:4], 16), int(name[5:], 16) + 1)
}


def normalised_pieces(text):
    """(start, end) of the smallest pieces whose normal forms, end to end, are the text's."""
    whole = unicodedata.normalize("NFKC", text)
    cuts = [
        place
        for place in range(len(text) + 1)
        if unicodedata.normalize("NFKC", text[:place]) + unicodedata.normalize("NFKC", text[place:])
        == whole
    ]
    return list(pairwise(cuts))


def words_by_hand(text):
    """(word, start, end): letter by letter, a character's script read from its name."""
    words, open_word = [], None
    for start, end in normalised_pieces(text):
        for letter in unicodedata.normalize("NFKC", text[start:end]).casefold():
            alone = unicodedata.name(letter, "").startswith(ALONE)
            if alone and unicodedata.category(letter)[0] in "LMN":
                words.append([letter, start, end])
                open_word = None
            elif letter in UNSEEN:
                continue
            elif not letter.isalnum():
                open_word = None
            elif open_word is None:
                open_word = [letter, start, end]
                words.append(open_word)
            else:
                open_word[0], open_word[2] = open_word[0] + letter, end
    return words


TEXTS = st.lists(st.sampled_from([*PIECES, " ", "\n"]) | st.text(max_size=3), max_size=8)


@given(TEXTS.map("".join))
@example("\u0301a\u0301 ｶﾞ ½x q\u0323\u0301")
def test_words_and_their_places_agree_with_reading_letter_by_letter(text):
    expected = words_by_hand(text)
    placed = placed_words(text)
    found = zip(placed.words, placed.starts.tolist(), placed.ends.tolist(), strict=True)
    assert [list(one) for one in found] == expected
    assert words_of(text) == placed.words
    assert (np.diff(placed.starts) >= 0).all()
    assert (np.diff(placed.ends) >= 0).all()


def test_marks_without_end_are_not_taken_apart():
    assert words_of("a" + "\u0301" * 5000) == placed_words("a" + "\u0301" * 5000).words == ["á"]


def users_by_hand(ids, documents, encoded):
    """Users who have the run by its tokens or by its words, None where it has no word."""
    number, start = next(
        (number, start)
        for number, (own, _) in enumerate(encoded)
        for start in range(len(own) - len(ids) + 1)
        if own[start : start + len(ids)] == ids
    )
    spans = encoded[number][1][start : start + len(ids)]
    begin, end = spans[0][0], spans[-1][1]
    placed = words_by_hand(documents[number][1])
    words = [word for word, first, last in placed if begin <= first and last <= end]
    if not words:
        words = [word for word, first, last in placed if first < end and begin < last]
    if not words:
        return None
    return {
        user
        for (user, text), (own, _) in zip(documents, encoded, strict=True)
        if occurrences(ids, own) or occurrences(words, [word for word, _, _ in words_by_hand(text)])
    }


def leaks_by_hand(sequences, encoded):
    """Groups of sequences: merged again and again while two share a token of a document."""
    groups = [
        (
            {row},
            {
                (number, start + i)
                for number, (own, _) in enumerate(encoded)
                for start in range(len(own) - len(ids) + 1)
                if own[start : start + len(ids)] == ids
                for i in range(len(ids))
            },
        )
        for row, ids in sequences.items()
    ]
    merged = True
    while merged:
        merged = False
        for one in groups:
            other = next((g for g in groups if g is not one and g[1] & one[1]), None)
            if other is not None:
                one[0].update(other[0])
                one[1].update(other[1])
                groups.remove(other)
                merged = True
                break
    return {frozenset(rows) for rows, _ in groups}


def random_documents(draw):
    users = [f"user-{i}" for i in range(draw.randint(2, 5))]
    pieces = draw.sample(PIECES, draw.randint(2, 7))
    return [
        (
            draw.choice(users),
            draw.choice([" ", "", " "]).join(draw.choices(pieces, k=draw.choice([0, 1, 3, 6, 12]))),
        )
        for _ in range(draw.randint(2, 9))
    ]


@given(seed=st.integers(0, 10**9))
def test_the_report_agrees_with_plain_python_over_the_texts(seed):
    draw = random.Random(seed)
    documents = random_documents(draw)
    kind, size = draw.choice([("bpe", 262), ("bpe", 280), ("bpe", 320), ("words", 30)])
    try:
        tokenizer = build_tokenizer(open_corpus(documents), kind=kind, size=size)
    except UsageError:
        tokenizer = build_tokenizer(open_corpus([("u", "the 33 ab")]), kind="bpe", size=262)
    model = BigramTable(len(tokenizer), seed, levels=draw.choice([2, 6, 40]))
    report = tightlip.audit(
        model, documents, tokenizer=tokenizer, top_k=draw.randint(1, 40), memory="1MB"
    )
    called = [
        tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for _, text in documents
    ]
    encoded = [(one["input_ids"], one["offset_mapping"]) for one in called]
    rows = report.sequences.to_pylist()
    unique = {}
    for place, row in enumerate(rows):
        if row["users_in_d"] != 1:
            assert (row["users_by_text"], row["unique_by_text"]) == (None, False)
            continue
        users = users_by_hand(row["token_ids"], documents, encoded)
        assert row["users_by_text"] == (users and len(users)), row
        assert row["users_by_text"] is None or row["users_by_text"] >= 1
        assert row["unique_by_text"] == (users is not None and len(users) == 1)
        if row["unique_by_text"]:
            unique[place] = row["token_ids"]
    expected = leaks_by_hand(unique, encoded)
    assert groups_of(rows) == expected
    owners = report.owners["owner"].to_pylist()
    assert report.leaks == len(expected)
    assert report.unique_by_text == len(unique) <= report.unique
    assert report.people_affected == len({owners[place] for place in unique})
    assert sum(report.users["leaks"].to_pylist()) == report.leaks
    assert sum(report.users["unique_by_text"].to_pylist()) == report.unique_by_text


def groups_of(rows):
    """The rows of each leak; a leak is called by the row of its longest sequence."""
    groups = {}
    for place, row in enumerate(rows):
        if row["leak"] is not None:
            groups.setdefault(row["leak"], set()).add(place)
        assert (row["leak"] is not None) == row["unique_by_text"]
    for name, places in groups.items():
        assert name == min(places, key=lambda place: (-rows[place]["num_tokens"], place))
    return {frozenset(places) for places in groups.values()}


@given(seed=st.integers(0, 10**9))
def test_links_of_pieces_and_shards_come_to_the_leaks_of_the_whole(seed):
    draw = random.Random(seed)
    documents = [
        (number % 3, [draw.randint(0, 3) for _ in range(draw.randint(0, 15))])
        for number in range(draw.randint(1, 12))
    ]
    cut = [
        tuple(ids[start : start + size])
        for _, ids in documents
        for start in range(len(ids))
        for size in (1, 2, 4)
    ]
    needles = draw.sample(sorted(set(cut)), min(len(set(cut)), 6))
    if not needles:
        return
    parents = np.arange(len(needles))
    bound = 20 * counting._BYTES_PER_TOKEN
    for shard in shards_of(corpus_of(documents), bound):
        by_text._join_all(parents, links_in_shard(shard, sequences_of(needles)))
    found = {frozenset(np.flatnonzero(parents == root).tolist()) for root in set(parents.tolist())}
    sequences = {place: list(needle) for place, needle in enumerate(needles)}
    assert found == leaks_by_hand(sequences, [(ids, None) for _, ids in documents])


def parrot_report(documents, **settings):
    """Everything is completed: every guess among as many as there are tokens is right."""
    tokenizer = build_tokenizer(open_corpus(documents), kind="bpe", size=300)
    model = BigramTable(len(tokenizer), 1)
    return tightlip.audit(model, documents, tokenizer=tokenizer, top_k=len(tokenizer), **settings)


def test_a_number_that_others_wrote_too_is_nobodys_own():
    others = [(name, "at 33 or 33 or 33") for name in ("bob", "cid", "eve", "fay")]
    documents = [("ann", "33"), *others, ("dan", "locker 4412")]
    report = parrot_report(documents)
    rows = {row["sequence"]: row for row in report.sequences.to_pylist()}
    assert (rows["33"]["users_in_d"], rows["33"]["users_by_text"]) == (1, 5)
    assert not rows["33"]["unique_by_text"]
    assert rows["locker 4412"]["unique_by_text"]


def test_the_sequence_behind_leakage_epsilon_is_named_and_its_ratios_spread(tmp_path):
    documents = [("ann", "my locker is 4412"), ("bob", "your dog has 9 lives"), ("cid", "33 33 33")]
    tokenizer = build_tokenizer(open_corpus(documents), kind="bpe", size=300)
    torch.manual_seed(0)
    sizes = {"embedding_size": 6, "hidden_size": 8, "num_layers": 1}
    public = GRUForCausalLM(GRUConfig(vocab_size=len(tokenizer), **sizes))
    public.save_pretrained(tmp_path / "public")
    tokenizer.save_pretrained(tmp_path / "public")
    report = tightlip.audit(
        BigramTable(len(tokenizer), 1), documents, tokenizer=tokenizer, top_k=9,
        public_model=tmp_path / "public",
    )  # fmt: skip
    ratios = [r["ratio"] for r in report.sequences.to_pylist() if r["users_in_d"] == 1]
    worst = report.sequences.to_pylist()[report.leakage_epsilon_sequence]
    assert worst["ratio"] == report.leakage_epsilon == max(ratios)
    assert report.ratio_quantiles["1"] == report.leakage_epsilon
    for share, at in report.ratio_quantiles.items():
        assert at == min(
            r for r in ratios if sum(x <= r for x in ratios) >= float(share) * len(ratios)
        )


def test_a_redacted_report_has_the_numbers_and_no_text(tmp_path):
    documents = [("ann", "my locker is 4412"), ("bob", "your dog has 9 lives")]
    report = parrot_report(documents, out=tmp_path / "r", redact=True)
    plain = parrot_report(documents)
    names = ("users_by_text", "unique_by_text", "leak")
    assert report.sequences.select(names).to_pylist() == plain.sequences.select(names).to_pylist()
    for name in ("unique_by_text", "leaks", "people_affected"):
        assert report.summary[name] == plain.summary[name] > 0
    assert report.failed("leaks>0", "people_affected>1") == ["leaks>0: leaks is 2", "people_affected>1: people_affected is 2"]  # fmt: skip


def test_a_corpus_that_changes_under_way_is_refused(monkeypatch):
    documents = [("ann", "my locker is 4412"), ("bob", "your dog")]
    original = by_text.numbered

    def changed(*given):
        for first, batch in original(*given):
            batch.texts[0] += " and more"
            yield first, batch

    monkeypatch.setattr(by_text, "numbered", changed)
    with pytest.raises(UsageError, match="changed while it was audited"):
        parrot_report(documents)
