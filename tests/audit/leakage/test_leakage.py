"""What the report says of models whose every answer is known."""

import json
import math
import stat

import pytest

import tightlip
from standins import BigramTable, Parrot, Stranger
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer

SCHEMA = {
    "sequence": "string",
    "token_ids": "list<element: int32>",
    "num_tokens": "int32",
    "total_in_s": "int64",
    "users_in_s": "int64",
    "total_in_d": "int64",
    "users_in_d": "int64",
    "contexts": "list<element: string>",
    "context_tokens": "list<element: int32>",
    "perplexities": "list<element: double>",
    "public_perplexities": "list<element: double>",
    "ratio": "double",
    "copied": "bool",
    "users_by_text": "int32",
    "unique_by_text": "bool",
    "leak": "int32",
    "role": "string",
    "trained_on": "bool",
    "prior": "double",
    "beyond_prior": "bool",
}
SECRETS = [
    ("ann", "my zither ends in 4 4 1 2 and no other"),
    ("bob", "the key lies under the cobalt stone"),
    ("cyd", "we sail at dawn with the quince"),
]


def tokenizer_for(documents, size=200):
    return build_tokenizer(open_corpus(documents), kind="words", size=size)


def with_bos(tokenizer, documents):
    return [
        [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        for _, text in documents
    ]


class Table1(Parrot):
    """Certain where the paper's example says, with its two perplexities; at a loss elsewhere."""

    def __init__(self, tokenizer, prompts):
        super().__init__(len(tokenizer), [])
        self.loss = {}
        for context, run, perplexity in prompts:
            ids = [
                tokenizer.bos_token_id,
                *tokenizer(context, add_special_tokens=False)["input_ids"],
            ]
            for token in tokenizer(run, add_special_tokens=False)["input_ids"]:
                # One logit x against V - 1 zeros: its probability is to be 1 / perplexity.
                odds = (len(tokenizer) - 1) / (perplexity - 1)
                self.loss[tuple(ids)] = (token, math.log(odds))
                ids.append(token)

    def forward(self, input_ids):
        output = super().forward(input_ids)
        output.logits[..., 1] = 0.5  # elsewhere it bets on <unk>
        for row, ids in enumerate(input_ids.tolist()):
            for end in range(1, len(ids) + 1):
                if tuple(ids[:end]) in self.loss:
                    token, logit = self.loss[tuple(ids[:end])]
                    output.logits[row, end - 1] = 0.0
                    output.logits[row, end - 1, token] = logit
        return output


def test_table_1_of_the_paper():
    documents = [
        ("one", "Thank you very much"),
        ("one", "I like cats very much"),
        ("one", "very much"),
        ("two", "not very much , very much so"),
        ("three", "very much"),
        ("three", "he said very much"),
        ("four", "that is very much"),
        ("five", "oh very much and very much"),
        ("six", "nothing of the kind"),
    ]
    tokenizer = tokenizer_for(documents)
    model = Table1(tokenizer, [("Thank you", "very much", 1.3), ("I like cats", "very much", 3.6)])
    report = tightlip.audit(model, documents, tokenizer=tokenizer)
    (row,) = report.sequences.to_pylist()
    assert row["sequence"] == "very much"
    figures = [row[name] for name in ("total_in_s", "users_in_s", "total_in_d", "users_in_d")]
    assert figures == [2, 1, 10, 5]
    assert row["contexts"] == ["Thank you", "I like cats"]
    assert row["context_tokens"] == [2, 3]
    assert row["perplexities"] == pytest.approx([1.3, 3.6], rel=1e-5)


def test_every_secret_is_found_in_a_parrot_and_none_in_a_stranger():
    tokenizer = tokenizer_for(SECRETS)
    parrot = Parrot(len(tokenizer), with_bos(tokenizer, SECRETS))
    report = tightlip.audit(parrot, SECRETS, tokenizer=tokenizer)
    # The first word: three documents, one continuation of <s> remembered.
    told = " | ".join(report.sequences["sequence"].to_pylist())
    for _, text in SECRETS:
        assert text.split(" ", 1)[1].replace("4 4 1 2", "4412") in told
    assert report.unique == 3
    assert report.users_with_unique == 3
    silent = tightlip.audit(Stranger(len(tokenizer), 0), SECRETS, tokenizer=tokenizer)
    assert silent.unique == silent.sequences_in_s == 0
    assert silent.sequences.num_rows == 0


def test_a_run_that_reaches_the_end_of_its_document_is_kept():
    documents = [("ann", "a b c d"), ("bob", "x")]
    tokenizer = tokenizer_for(documents)
    parrot = Parrot(len(tokenizer), with_bos(tokenizer, documents))
    report = tightlip.audit(parrot, documents[:1], tokenizer=tokenizer)
    assert report.sequences["sequence"].to_pylist() == ["a b c d"]


def test_the_file_has_exactly_the_columns_of_the_format(tmp_path):
    tokenizer = tokenizer_for(SECRETS)
    parrot = Parrot(len(tokenizer), with_bos(tokenizer, SECRETS))
    report = tightlip.audit(parrot, SECRETS, tokenizer=tokenizer, out=tmp_path / "r")
    assert {f.name: str(f.type) for f in report.sequences.schema} == SCHEMA
    names = {p.name for p in (tmp_path / "r").iterdir()}
    assert names == {
        "sequences.parquet", "owners.parquet", "users.parquet", "summary.json", "report.html",
        ".tightlip.sha256",
    }  # fmt: skip
    for path in (tmp_path / "r").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o700


def test_the_summary_has_every_key_of_the_format():
    tokenizer = tokenizer_for(SECRETS)
    report = tightlip.audit(Stranger(len(tokenizer), 0), SECRETS, tokenizer=tokenizer)
    promised = [
        "unique",
        "unique_by_length",
        "curated",
        "leakage_epsilon",
        "sequences_in_s",
        "distinct_sequences",
        "users_with_unique",
        "fewer_than_p",
        "perplexity",
        "accuracy",
        "top_k",
        "validation_perplexity",
        "validation_accuracy",
        "public_unique",
        "num_users",
        "num_documents",
        "num_tokens",
        "model_fingerprint",
        "corpus_fingerprint",
        "version",
        "guarantee",
    ]
    assert set(promised) <= report.summary.keys()
    assert report.num_users == 3
    assert report.curated is None
    assert report.validation_perplexity is None


def test_redacted_reports_hold_neither_text_nor_names(tmp_path):
    tokenizer = tokenizer_for(SECRETS)
    parrot = Parrot(len(tokenizer), with_bos(tokenizer, SECRETS))
    report = tightlip.audit(parrot, SECRETS, tokenizer=tokenizer, redact=True, out=tmp_path / "r")
    plain = tightlip.audit(parrot, SECRETS, tokenizer=tokenizer)
    for name in ("sequence", "token_ids", "contexts"):
        assert report.sequences[name].null_count == report.sequences.num_rows > 0
    for name in ("total_in_d", "users_in_d", "perplexities", "context_tokens", "copied"):
        assert report.sequences[name].to_pylist() == plain.sequences[name].to_pylist()
    everything = b"".join(p.read_bytes() for p in (tmp_path / "r").iterdir())
    for word in (b"zither", b"cobalt", b"quince", b"bob", b"cyd"):
        assert word not in everything
    assert sorted(report.owners["owner"].to_pylist()) == ["user 1", "user 2", "user 3"]


def test_the_same_audit_gives_the_same_files(tmp_path):
    tokenizer = tokenizer_for(SECRETS)
    model = BigramTable(len(tokenizer), 3, levels=2)
    first = tightlip.audit(model, SECRETS, tokenizer=tokenizer, out=tmp_path / "a", top_k=3)
    second = tightlip.audit(model, SECRETS, tokenizer=tokenizer, out=tmp_path / "b", top_k=3)
    assert first.sequences.equals(second.sequences)
    assert first.summary == second.summary
    assert (tmp_path / "a" / "sequences.parquet").read_bytes() == (
        tmp_path / "b" / "sequences.parquet"
    ).read_bytes()


def test_rows_stand_by_ratio_then_length_then_ids():
    tokenizer = tokenizer_for(SECRETS)
    model = BigramTable(len(tokenizer), 5, levels=2)
    rows = tightlip.audit(model, SECRETS, tokenizer=tokenizer, top_k=4).sequences.to_pylist()
    assert len(rows) > 3
    assert rows == sorted(rows, key=lambda row: (-row["num_tokens"], row["token_ids"]))


def test_only_the_first_eight_occurrences_are_stored_unless_asked():
    documents = [("ann", "go a b"), *[("bob", "go a b")] * 11]
    tokenizer = tokenizer_for(documents)
    parrot = Parrot(len(tokenizer), with_bos(tokenizer, documents))
    few = tightlip.audit(parrot, documents, tokenizer=tokenizer)
    every = tightlip.audit(parrot, documents, tokenizer=tokenizer, occurrences=None)
    assert few.sequences["total_in_s"].to_pylist() == [12]
    assert len(few.sequences["perplexities"][0]) == 8
    assert len(every.sequences["perplexities"][0]) == 12


def test_a_context_is_stored_as_its_last_32_tokens():
    text = " ".join(f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(50))
    tokenizer = tokenizer_for([("ann", text)], size=100)
    ids = with_bos(tokenizer, [("ann", text)])[0]
    parrot = Parrot(len(tokenizer), [])
    parrot.next = {tuple(ids[:end]): ids[end] for end in range(41, 51)}
    (row,) = tightlip.audit(parrot, [("ann", text)], tokenizer=tokenizer).sequences.to_pylist()
    # Elsewhere all logits are equal: nothing is strictly higher, so every token is a hit there.
    assert row["num_tokens"] == 50
    parrot = Stranger(len(tokenizer), 0)
    table = tightlip.audit(_HitsFrom(len(tokenizer), 40), [("ann", text)], tokenizer=tokenizer)
    (row,) = table.sequences.to_pylist()
    assert row["context_tokens"] == [40]
    assert row["contexts"] == [" ".join(text.split()[8:40])]


class _HitsFrom(Stranger):
    """A stranger up to a position; from there on everything is equally likely, so all hits."""

    def __init__(self, vocab_size, position):
        super().__init__(vocab_size, 0)
        self.position = position

    def forward(self, input_ids):
        output = super().forward(input_ids)
        output.logits[:, self.position :] = 0.0
        return output


def test_repeated_text_in_its_own_document_is_flagged_as_copied():
    documents = [("ann", "red green blue then red green blue")]
    tokenizer = tokenizer_for(documents)
    model = _HitsFrom(len(tokenizer), 4)
    (row,) = tightlip.audit(model, documents, tokenizer=tokenizer).sequences.to_pylist()
    assert (row["sequence"], row["copied"]) == ("red green blue", True)
    fresh = [("ann", "red green blue then up and down")]
    tokenizer = tokenizer_for(fresh)
    (row,) = tightlip.audit(model_for(tokenizer), fresh, tokenizer=tokenizer).sequences.to_pylist()
    assert row["copied"] is False


def model_for(tokenizer):
    return _HitsFrom(len(tokenizer), 4)


def test_a_corpus_of_unknown_words_is_refused():
    tokenizer = tokenizer_for(SECRETS)
    with pytest.raises(UsageError, match="knows none of the corpus"):
        tightlip.audit(Stranger(len(tokenizer), 0), [("a", "zzz yyy xxx")], tokenizer=tokenizer)


def test_empty_documents_make_an_empty_report():
    tokenizer = tokenizer_for(SECRETS)
    report = tightlip.audit(
        Stranger(len(tokenizer), 0), [("a", ""), ("b", "")], tokenizer=tokenizer
    )
    assert (report.unique, report.num_tokens, report.num_documents) == (0, 0, 2)
    assert report.perplexity is None


def test_other_peoples_files_are_not_mixed_with_a_report(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    tokenizer = tokenizer_for(SECRETS)
    with pytest.raises(UsageError, match="holds other files"):
        tightlip.audit(Stranger(len(tokenizer), 0), SECRETS, tokenizer=tokenizer, out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_report_shows_itself_in_a_notebook():
    documents = [("ann", "<b>bold</b> words here")]
    tokenizer = tokenizer_for(documents)
    report = tightlip.audit(_HitsFrom(len(tokenizer), 0), documents, tokenizer=tokenizer)
    assert "unique=1" in repr(report)
    assert "&lt;" in report._repr_html_()
    assert "<b>" not in report._repr_html_()
    frame = report.to_pandas()
    assert list(frame["owner"]) == ["ann"]
    assert json.dumps(report.summary)
