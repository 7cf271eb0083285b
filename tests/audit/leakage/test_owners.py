"""Audits of texts with several owners against looking at every document by hand."""

import os
import random
import resource
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import oracle
import tightlip
from audit.leakage.test_counting import corpus_of, sequences_of
from standins import BigramTable
from tightlip.audit.leakage.counting import Sequences, least_memory
from tightlip.audit.leakage.leaks import count_in_corpus
from tightlip.audit.leakage.spill import Room
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.engines.local import LocalEngine


def owned_corpus(documents):
    """The corpus of (owners, ids), the first owner its writer."""
    plain = corpus_of([(owners[0], ids) for owners, ids in documents])
    names = [str(number) for number in range(1 + max(max(owners) for owners, _ in documents))]
    return replace(
        plain,
        user_names=names,
        owners=np.array([owner for owners, _ in documents for owner in owners], np.int32),
        owner_bounds=np.cumsum([0, *(len(owners) for owners, _ in documents)]),
    )


def random_documents(draw, num_users=6):
    return [
        (
            draw.sample(range(num_users), draw.choice([1, 1, 2, 3])),
            draw.choices(range(4), k=draw.randint(0, 9)),
        )
        for _ in range(draw.randint(1, 14))
    ]


def whose(needle, documents):
    """Oracle: occurrences, everybody who owns a document with it, and who owns them all."""
    having = [(owners, n) for owners, ids in documents if (n := oracle.occurrences(needle, ids))]
    owners = [{*own} for own, _ in having]
    everybody = set.union(*owners) if owners else set()
    of_all = set.intersection(*owners) if owners else set()
    return sum(n for _, n in having), everybody, of_all


@pytest.mark.parametrize("memory", ["plenty", "least"])
@pytest.mark.parametrize("seed", range(25))
def test_counts_agree_with_every_document_by_hand_however_it_is_cut(seed, memory):
    draw = random.Random(seed)
    documents = random_documents(draw)
    corpus = owned_corpus(documents)
    needles = {tuple(draw.choices(range(4), k=draw.randint(1, 3))) for _ in range(20)}
    needles = [list(needle) for needle in sorted(needles)]
    room = 10**9 if memory == "plenty" else least_memory(corpus)
    counts = count_in_corpus(corpus, sequences_of(needles), LocalEngine(1), room)
    by_hand = [whose(needle, documents) for needle in needles]
    assert counts.totals.tolist() == [total for total, _, _ in by_hand]
    assert counts.users.tolist() == [len(everybody) for _, everybody, _ in by_hand]
    assert list(map(tuple, counts.owned.T.tolist())) == [
        (number, user) for number, (_, _, of_all) in enumerate(by_hand) for user in sorted(of_all)
    ]


@pytest.mark.parametrize("with_owners", [False, True])
def test_of_people_larger_than_a_shard_one_at_a_time_is_known(with_owners, tmp_path):
    """Where sequences are in files each would take one, and a process may open so many."""
    documents = [([user], [user % 5, 1, 2]) for user in range(100) for _ in range(2)]
    documents += [([0, 1], [3, 1, 4])]
    corpus = owned_corpus(documents)
    if not with_owners:
        corpus = replace(corpus, owners=None, owner_bounds=None)
        documents = [(owners[:1], ids) for owners, ids in documents]
    needles = [[1, 2], [0, 1], [4], [3, 1, 4], [4, 4]]
    in_memory = sequences_of(needles)
    room = Room(folder=tmp_path, at_once=2)
    sequences = Sequences(tokens=in_memory.tokens, offsets=in_memory.offsets, room=room)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        counts = count_in_corpus(corpus, sequences, LocalEngine(1), least_memory(corpus))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    by_hand = [whose(needle, documents) for needle in needles]
    assert counts.users.tolist() == [len(everybody) for _, everybody, _ in by_hand]
    assert list(map(tuple, counts.owned.T.tolist())) == [
        (number, user) for number, (_, _, of_all) in enumerate(by_hand) for user in sorted(of_all)
    ]


WORDS = ["noon", "lunch", "tuesday", "invoice", "thanks", "ring", "me"]


def mail(draw):
    people = ["ann", "bob", "cyd", "dan"]
    return [
        (
            draw.sample(people, draw.choice([1, 2, 2, 3])),
            " ".join(draw.choices(WORDS, k=draw.randint(0, 6))),
        )
        for _ in range(draw.randint(2, 10))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_report_counts_a_sequence_for_each_owner_and_names_whoever_owns_all_of_it(seed):
    draw = random.Random(seed)
    documents = mail(draw)
    if not any(text for _, text in documents):
        documents.append((["ann", "bob"], "noon"))
    tokenizer = build_tokenizer(open_corpus(documents))
    model = BigramTable(len(tokenizer), seed, levels=draw.choice([2, 6]))
    report = tightlip.audit(model, documents, tokenizer=tokenizer, top_k=4)
    encoded = [
        (owners, tokenizer(text, add_special_tokens=False)["input_ids"])
        for owners, text in documents
    ]
    rows, owners = report.sequences.to_pylist(), report.owners["owner"].to_pylist()
    num_unique, affected = Counter(), set()
    for row, named in zip(rows, owners, strict=True):
        total, everybody, of_all = whose(row["token_ids"], encoded)
        assert (row["total_in_d"], row["users_in_d"]) == (total, len(everybody))
        assert row["users_in_s"] <= len(everybody)
        assert {*(named or "").split(", ")} - {""} == of_all
        assert row["unique_by_text"] == bool(of_all)  # words are tokens here
        num_unique.update(of_all)
        affected |= of_all
    summary = report.summary
    assert summary["unique"] == sum(named is not None for named in owners)
    assert summary["people_affected"] == summary["users_with_unique"] == len(affected)
    users = report.users.to_pylist()
    assert {user["user"]: user["unique"] for user in users if user["unique"]} == dict(num_unique)
    written = Counter(owner for owners, _ in documents for owner in owners)
    assert {user["user"]: user["num_documents"] for user in users} == dict(written)
    assert summary["num_documents"] == len(documents)


def test_what_stands_in_one_mail_alone_is_both_its_owners_and_never_nobodys():
    documents = [(["ann", "bob"], "pin 7 7 4"), (["cyd", "bob"], "noon lunch")]
    tokenizer = build_tokenizer(open_corpus(documents))
    report = tightlip.audit(
        BigramTable(len(tokenizer), 0), documents, tokenizer=tokenizer, top_k=99
    )
    assert {*report.owners["owner"].to_pylist()} == {"ann, bob", "bob, cyd"}
    assert report.summary["people_affected"] == 3
    redacted = tightlip.audit(
        BigramTable(len(tokenizer), 0), documents, tokenizer=tokenizer, top_k=99, redact=True
    )
    assert {*redacted.owners["owner"].to_pylist()} == {"user 1, user 2", "user 2, user 3"}
