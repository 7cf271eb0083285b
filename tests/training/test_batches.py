from itertools import chain

import numpy as np
import pytest

from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.training.batches import epoch_order, gather, rows_of

BOS, PAD = 1, 0


def corpus_of(documents, users=None):
    """A corpus of these token lists."""
    lengths = [len(document) for document in documents]
    return TokenizedCorpus(
        tokens=np.array([token for document in documents for token in document], np.int32),
        bounds=np.cumsum([0, *lengths]),
        users=np.array(users if users is not None else range(len(documents)), np.int32),
        user_names=[f"user {n}" for n in range(len(documents))],
        corpus_fingerprint="",
        tokenizer_fingerprint="",
    )


def random_corpus(seed, num_documents=30, longest=25):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, longest, num_documents)
    # All tokens differ, so a row tells where it came from.
    ends = np.cumsum(lengths) + 10
    documents = [list(range(end - n, end)) for end, n in zip(ends, lengths, strict=True)]
    return corpus_of(documents, users=draw.integers(0, 5, num_documents)), documents


def rows_by_hand(document, sequence_length, bos):
    """Oracle: take targets one at a time, opening a new row when one is full."""
    ids = ([BOS] if bos else []) + document
    rows = []
    for place in range(1, len(ids)):
        if (place - 1) % sequence_length == 0:
            rows.append([ids[place - 1]])
        rows[-1].append(ids[place])
    return rows


def as_lists(rows):
    """Every row as its ids, read from batches of one."""
    return [gather(rows, np.array([i])).input_ids_BT[0].tolist() for i in range(len(rows))]


@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize("sequence_length", [1, 3, 8, 100])
def test_rows_are_those_cut_by_hand(sequence_length, bos):
    corpus, documents = random_corpus(seed=sequence_length)
    rows = rows_of(corpus, sequence_length=sequence_length, bos=bos)
    by_hand = [rows_by_hand(document, sequence_length, bos) for document in documents]
    assert as_lists(rows) == [row for document in by_hand for row in document]
    owners = [user for user, document in zip(corpus.users, by_hand, strict=True) for _ in document]
    assert rows.users.tolist() == owners


def test_every_token_is_a_target_exactly_once_over_an_epoch():
    corpus, _ = random_corpus(seed=3)
    rows = rows_of(corpus, sequence_length=7, bos=BOS)
    targets = [
        target
        for chosen in epoch_order(rows, batch_size=4, seed=0, epoch=0)
        for target in gather(rows, chosen).target_ids_N.tolist()
    ]
    assert sorted(targets) == sorted(corpus.tokens.tolist())


def test_documents_of_users_left_out_give_no_row():
    corpus, documents = random_corpus(seed=4)
    rows = rows_of(corpus, sequence_length=7, bos=BOS, without_users=frozenset({1, 3}))
    kept = [d for d, user in zip(documents, corpus.users, strict=True) if user not in (1, 3)]
    assert list(chain(*kept)) == [token for row in as_lists(rows) for token in row[1:]]
    other = rows_of(corpus, sequence_length=7, bos=BOS, without_users=frozenset({1, 2}))
    assert rows.fingerprint() != other.fingerprint()


def test_a_document_of_one_token_and_no_bos_has_nothing_to_predict():
    assert len(rows_of(corpus_of([[5], []]), sequence_length=4, bos=None)) == 0
    assert len(rows_of(corpus_of([[5], []]), sequence_length=4, bos=BOS)) == 1


@pytest.mark.parametrize("widths", [(), (4, 30)])
def test_a_batch_is_its_rows_padded_on_the_right(widths):
    corpus, _ = random_corpus(seed=5)
    rows = rows_of(corpus, sequence_length=9, bos=BOS, pad=PAD)
    lists = as_lists(rows)
    chosen = np.array([3, 0, 7])
    batch = gather(rows, chosen, widths=widths)
    width = 31 if widths else max(len(lists[i]) for i in chosen)
    for place, i in enumerate(chosen):
        padding = width - len(lists[i])
        assert batch.input_ids_BT[place].tolist() == lists[i] + [PAD] * padding
        assert batch.labels_BT[place].tolist() == [NO_LABEL, *lists[i][1:]] + [NO_LABEL] * padding
    flat = batch.targets.flatten()
    assert flat[batch.places_N].tolist() == batch.target_ids_N.tolist()
    assert batch.num_targets == int((flat != NO_LABEL).sum()) == rows.num_targets[chosen].sum()


def test_a_batch_may_be_empty():
    corpus, _ = random_corpus(seed=5)
    rows = rows_of(corpus, sequence_length=9, bos=BOS)
    batch = gather(rows, np.array([], np.int64))
    assert batch.num_targets == 0
    assert batch.inputs.shape == (0, 1)


def test_an_epoch_holds_every_row_once_and_depends_on_seed_and_epoch_alone():
    corpus, _ = random_corpus(seed=6, num_documents=100)
    rows = rows_of(corpus, sequence_length=5, bos=BOS)

    def order(seed, epoch):
        return [batch.tolist() for batch in epoch_order(rows, batch_size=8, seed=seed, epoch=epoch)]

    first = order(0, 0)
    assert sorted(chain(*first)) == list(range(len(rows)))
    assert sorted(map(len, first))[1:] == [8] * (len(first) - 1)
    assert first == order(0, 0)
    assert first != order(0, 1)
    assert first != order(1, 0)


def test_rows_of_like_length_share_a_batch():
    corpus, _ = random_corpus(seed=7, num_documents=4000, longest=60)
    rows = rows_of(corpus, sequence_length=100, bos=BOS)
    width = [
        gather(rows, chosen).inputs.numel()
        for chosen in epoch_order(rows, batch_size=16, seed=0, epoch=0)
    ]
    assert sum(width) < 1.1 * rows.num_targets.sum()
