"""Texts to raw vectors: each text by itself, whatever stands beside it, however long it is."""

import numpy as np
import pytest
import torch

from tightlip.core.errors import UsageError
from tightlip.vectors.extractors import make_extractor
from vectors.toy_corpora import FILLERS, tiny_encoder, toy_corpus

TEXTS = [row["text"] for row in toy_corpus(40)] + ["", "goal", " ".join(FILLERS * 5), "unseen"]
KINDS = ["bag", "lstm", "bert", "roberta"]


@pytest.fixture(scope="module")
def extractors(tmp_path_factory):
    torch.manual_seed(0)
    made = {kind: make_extractor(kind, TEXTS, dimensions=16) for kind in ("bag", "lstm")}
    for kind in ("bert", "roberta"):
        folder = tiny_encoder(tmp_path_factory.mktemp(kind), kind)
        made[kind] = make_extractor(folder, [], pooling="mean")
    return {kind: extractor.eval() for kind, extractor in made.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_does_not_depend_on_the_texts_beside_it(extractors, kind):
    together = extractors[kind].encode(TEXTS, batch_size=7)
    alone = np.concatenate([extractors[kind].encode([text]) for text in TEXTS])
    assert together.shape == (len(TEXTS), 16)
    assert together.dtype == np.float32
    assert np.abs(together - alone).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_beyond_the_window_changes_nothing(extractors, kind):
    extractor = extractors[kind]
    words = (FILLERS * 9)[: extractor.max_tokens * 2]
    changed = [*words[:-1], "goal"]
    one, other = extractor.encode([" ".join(words), " ".join(changed)])
    assert np.array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_empty_text_has_a_finite_vector(extractors, kind):
    assert np.isfinite(extractors[kind].encode([""])).all()
    assert extractors[kind].encode([]).shape == (0, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_word_is_one_mask_token(extractors, kind):
    """The mask word in a text must be the mask, not its letters."""
    extractor = extractors[kind]
    (row,) = extractor.token_ids([f"goal {extractor.mask_word} bank"])
    assert row.count(extractor.tokenizer.mask_token_id) == 1
    (whole,) = extractor.token_ids(["goal match bank"])
    assert len(row) == len(whole)


def test_pooling_is_the_mean_of_real_tokens_or_the_first(tmp_path):
    folder = tiny_encoder(tmp_path, "bert")
    mean, first = (make_extractor(folder, [], pooling=name).eval() for name in ("mean", "cls"))
    batch = mean.tokenize(["goal bank", "goal"])
    with torch.no_grad():
        states = mean.model(**batch).last_hidden_state
        assert torch.allclose(mean(**batch)[1], states[1, :3].mean(dim=0), atol=1e-6)
        assert torch.allclose(first(**batch), states[:, 0], atol=1e-6)


def test_how_sentence_transformers_pools_is_followed_unless_told_otherwise(tmp_path):
    folder = tiny_encoder(tmp_path, "bert")
    assert make_extractor(folder, []).pooling == "cls"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert make_extractor(folder, []).pooling == "mean"
    assert make_extractor(folder, [], pooling="cls").pooling == "cls"


def test_a_learnt_vocabulary_is_of_words_that_stand_twice():
    extractor = make_extractor("bag", ["Goal goal once", "the match the"], dimensions=4)
    known = extractor.tokenizer.get_vocab()
    assert "goal" in known
    assert "the" in known
    assert "once" not in known


@pytest.mark.parametrize(
    ("spec", "settings", "because"),
    [
        ("lsmt", {}, "Closest: lstm"),
        ("bag", {"pooling": "cls"}, "mean"),
        ("bag", {"pooling": "max"}, "Unknown pooling"),
        ("bag", {"vocabulary_size": 3}, "no room"),
        ("bert", {"max_tokens": 21}, "more than the 20"),
        ("bert", {"dimensions": 8}, "shape of its own"),
    ],
)
def test_what_cannot_be_made_is_refused(spec, settings, because, tmp_path):
    if spec == "bert":
        spec = tiny_encoder(tmp_path, "bert")
    with pytest.raises(UsageError, match=because):
        make_extractor(spec, TEXTS, **settings)


def test_encoding_leaves_a_training_extractor_in_training(extractors):
    extractor = extractors["lstm"].train()
    extractor.encode(TEXTS[:2])
    assert extractor.training
    extractor.eval()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_the_wide_mask_a_gpu_is_given_means_the_same(extractors, kind):
    """Both ways: with all of it real, the short text's vectors are others."""
    extractor = extractors[kind]
    batch = extractor.tokenize(["goal bank match", "goal"])
    wide = extractor._wide(batch["attention_mask"])
    assert wide.shape == (2, 1, 1, batch["input_ids"].shape[1])
    with torch.no_grad():
        found, plain, wrong = (
            extractor.model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
            for mask in (wide, batch["attention_mask"], torch.ones_like(wide))
        )
    real = batch["attention_mask"].bool()
    assert torch.allclose(found[real], plain[real], atol=1e-6)
    assert not torch.allclose(wrong[real], plain[real], atol=1e-3)
    assert extractors["lstm"]._wide(batch["attention_mask"]) is batch["attention_mask"]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_every_text_is_prepared_and_read_once_and_batches_are_of_like_length(
    extractors, batch_size
):
    extractor, asked = extractors["bag"], []

    def prepared(places):
        asked.extend(places.tolist())
        return [TEXTS[place].upper() for place in places]

    batches = list(extractor.batches(TEXTS, batch_size, prepared))
    assert sorted(asked) == list(range(len(TEXTS)))
    assert sorted(n for places, _ in batches for n in places) == list(range(len(TEXTS)))
    for places, batch in batches:
        rows = extractor.token_ids([TEXTS[place] for place in places])  # it reads lower case
        assert [
            row[: len(ids)] for row, ids in zip(batch["input_ids"].tolist(), rows, strict=True)
        ] == rows
        assert batch["attention_mask"].sum(dim=1).tolist() == [max(1, len(row)) for row in rows]
    lengths = [batch["input_ids"].shape[1] for _, batch in batches]
    assert lengths[0] == max(lengths)


def test_a_stream_left_early_puts_the_extractor_back(extractors):
    extractor = extractors["lstm"].train()
    coming = extractor.stream(TEXTS, batch_size=4)
    first = next(coming)
    assert first.arrived().shape == (4, 16)
    assert not extractor.training
    coming.close()
    assert extractor.training
    extractor.eval()
