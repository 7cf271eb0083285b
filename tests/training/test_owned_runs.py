"""Runs on mails, each of which is its recipients' too, from a file to the ledger and an audit."""

import json
import random

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import tightlip
from tightlip.cli.main import app
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.privacy.accounting import OWNED, Mechanism, epsilon_spent
from tightlip.privacy.sampling import NOT_PROTECTED
from tightlip.training.batches import rows_of
from training.small_corpora import WORDS, other_peoples_documents

pytestmark = pytest.mark.slow

SMALL = {
    "model": "lstm", "embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 4,
    "sequence_length": 10, "steps": 4, "mitigation": "dp", "noise_multiplier": 2.0, "documents_per_owner": 2,
}  # fmt: skip


def mails(num_documents=60, num_people=12, seed=0):
    draw = random.Random(seed)
    rows = []
    for number in range(num_documents):
        people = draw.sample(range(num_people), draw.choice([1, 2, 2, 3]))
        start, length = draw.randrange(len(WORDS)), draw.randint(0 if number % 7 else 1, 9)
        words = [WORDS[(start + place) % len(WORDS)] for place in range(length)]
        rows.append({"user": [f"p{one}" for one in people], "text": " ".join(words)})
    return rows


@pytest.fixture(scope="module")
def public_tokenizer(tmp_path_factory):
    made = prepare(other_peoples_documents(), tmp_path_factory.mktemp("o") / "p", PrepareConfig())
    return made.tokenizer_folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, public_tokenizer):
    folder = tmp_path_factory.mktemp("mail")
    (folder / "mail.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mails()))
    tightlip.prepare(
        folder / "mail.jsonl", folder / "p", split="none", tokenizer=str(public_tokenizer)
    )
    return folder / "p"


def test_a_run_on_mails_from_train_to_ledger_and_audit(corpus, tmp_path):
    run = tightlip.train(corpus, tmp_path / "run", **SMALL)
    told = tightlip.ledger(run)
    owners = [row["user"] for row in mails()]
    assert (told["unit"], told["adjacency"], told["standing"]) == ("user", OWNED, "proved")
    assert told["num_units"] == len({one for own in owners for one in own})
    assert told["documents_per_owner"] == 2
    assert NOT_PROTECTED in told["outside"]
    assert told["sampling_rate"] == 4 / told["documents_taken"]
    spent = Mechanism(
        noise_multiplier=2.0, sampling_rate=told["sampling_rate"], documents_per_owner=2
    )
    assert told["epsilon"] == pytest.approx(epsilon_spent(spent, 4, told["delta"]))
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path / "run")])
    assert shown.exit_code == 0
    words = " ".join(shown.output.split())
    for line in ("none of one owner's texts", "who wrote to whom", "documents per owner 2"):
        assert line in words
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert OWNED in card
    assert NOT_PROTECTED in card
    report = tightlip.audit(tmp_path / "run", out=tmp_path / "report")
    counted = pq.read_table(tmp_path / "report" / "users.parquet").to_pylist()
    assert {row["user"]: row["num_documents"] for row in counted} == {
        one: sum(one in own for own in owners) for own in owners for one in own
    }
    assert report.summary["num_documents"] == len(owners)
    # The same command goes on where it stopped: nothing is left, and nothing is charged again.
    assert tightlip.ledger(tightlip.train(corpus, tmp_path / "run", **SMALL))["steps"] == 4


def test_a_document_is_left_out_with_any_of_its_owners(corpus):
    train = open_prepared(corpus).train
    gone = train.user_names.index("p3")
    rows = rows_of(train, sequence_length=10, bos=None, without_users=frozenset({gone}))
    having = [number for number, row in enumerate(mails()) if "p3" in row["user"]]
    there = rows_of(train, sequence_length=10, bos=None)
    assert {*having} & {*there.documents.tolist()}
    assert {*rows.documents.tolist()} == {*there.documents.tolist()} - {*having}


def test_a_document_as_the_unit_asks_for_no_owners(corpus, tmp_path):
    settings = {**SMALL, "unit": "example", "documents_per_owner": None}
    told = tightlip.ledger(tightlip.train(corpus, tmp_path / "run", **settings))
    assert told["adjacency"] == "add or remove one example"
    assert "documents_per_owner" not in told


@pytest.mark.parametrize(
    ("settings", "because"),
    [({"split": "text"}, "split='text' decides by a text"), ({"bad_rows": "skip"}, "bad_rows='skip' decides")],
)  # fmt: skip
def test_what_lets_a_text_decide_who_is_drawn_is_refused(
    tmp_path, public_tokenizer, settings, because
):
    given = {"split": "none", "tokenizer": str(public_tokenizer), **settings}
    tightlip.prepare(mails(), tmp_path / "p", **given)
    with pytest.raises(GuaranteeError, match=because):
        tightlip.train(tmp_path / "p", tmp_path / "run", **SMALL)


def test_a_split_that_a_refusal_advises_is_taken(tmp_path, public_tokenizer):
    given = {"tokenizer": str(public_tokenizer), "split": "user"}
    with pytest.raises(GuaranteeError, match=r"Use split='document' or none\."):
        tightlip.train(mails(), tmp_path / "run", prepare=given, **SMALL)
    run = tightlip.train(mails(), tmp_path / "run", prepare=given | {"split": "document"}, **SMALL)
    assert run.guarantee["standing"] == "proved"


def test_a_noisy_vocabulary_covers_writers_alone_and_is_refused(tmp_path):
    tightlip.prepare(mails(), tmp_path / "p", split="none", vocabulary_noise=5.0)
    with pytest.raises(GuaranteeError, match="texts here have other owners too"):
        tightlip.train(tmp_path / "p", tmp_path / "run", **SMALL)


def test_planted_people_of_one_text_are_refused(corpus, tmp_path):
    with pytest.raises(UsageError, match="plants people with one text each"):
        tightlip.train(corpus, tmp_path / "run", **SMALL, dp_check_canaries=10)


def test_a_corpus_of_single_owners_takes_no_such_number(tmp_path, public_tokenizer):
    rows = [row | {"user": row["user"][0]} for row in mails()]
    given = {"split": "none", "tokenizer": str(public_tokenizer)}
    tightlip.prepare(rows, tmp_path / "p", **given)
    with pytest.raises(UsageError, match="is for texts with several owners"):
        tightlip.train(tmp_path / "p", tmp_path / "run", **SMALL)
    assert open_prepared(tmp_path / "p").train.owners is None
