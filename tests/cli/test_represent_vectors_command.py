import json
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import tightlip
from tightlip.cli.main import app
from tightlip.core.errors import UsageError
from tightlip.core.figures import rounded_up
from tightlip.vectors.guarantees import VectorMechanism, cost_of_releases, cost_of_texts
from tightlip.vectors.server import read_vectors, write_vectors
from tightlip.vectors.settings import MECHANISMS
from vectors.tiny_halves import LABELS, TEXTS, write_halves

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Told:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str

    @property
    def refusal(self):
        (line,) = [line for line in self.err.splitlines() if line.startswith("tightlip: ")]
        return line


def tell(*arguments):
    """`tightlip represent ...` in this process: starting one takes longer than most commands."""
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(each) for each in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return Told(found.exit_code, found.stdout, found.stderr)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_halves(folder, dropout=0.25)
    return folder


@pytest.fixture
def corpus(tmp_path):
    """Twelve texts of four users, one text three times."""
    table = pa.table(
        {
            "user": [f"u{number % 4}" for number in range(12)],
            "text": [
                *TEXTS[:2],
                "the cat and the dog",
                *["anna sat"] * 3,
                *(f"cat {n}" for n in range(6)),
            ],
            "label": (LABELS * 6),
            "marks": [["sat"]] * 3 + [None] * 9,
        }
    )
    pq.write_table(table, tmp_path / "texts.parquet")
    return tmp_path / "texts.parquet"


def test_a_guarantee_is_told_without_a_model():
    """The issue's own example."""
    done = tell(
        "represent", "guarantee", "--dimensions", 384, "--epsilon", 0.05,
        "--mechanism", "laplace-as-published", "--dropout", 0, "--delta", "1e-5", "--json",
    )  # fmt: skip
    record = json.loads(done.out)
    assert (record["per_coordinate"], record["pure"], record["delta"]) == (0.05, 19.2, 1e-5)
    assert 4.21 <= record["epsilon"] < 4.22
    assert record["standing"] in ("proved", "as published")
    assert [cost["releases"] for cost in record["releases"]] == [1, 10, 100]
    whole = VectorMechanism(mechanism="laplace-as-published", dimensions=384, epsilon=0.05)
    assert record["releases"][1]["epsilon"] == cost_of_releases(whole, 10)[0]


def test_three_lines_are_printed_with_the_texts_each_holds_for():
    done = tell("represent", "guarantee", "--dimensions", 384, "--epsilon", 0.05, "--dropout", 0.5)
    assert "ε = 0.026 (as published)" in done.out
    assert "ε = 18.51 (proved)" in done.out
    assert "ε = 3.39 at δ = 1e-05 (proved)" in done.out
    assert "differ in one word" in done.out
    assert "per coordinate ε = 0.050; pure ε = 19.20; (ε, δ) ε = 4.22" in done.out
    assert "100 vectors of a text" in done.out


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        (["--mechanism", "laplas"], "Unknown mechanism 'laplas'"),
        (["--epsilon", "0"], "no budget"),
        (["--dropout", "1"], "not a share of words"),
        (["--mechanism", "gaussian", "--delta", "0"], "Gaussian noise bounds nothing"),
    ],
)
def test_a_guarantee_that_cannot_be_is_refused(flags, because):
    done = tell("represent", "guarantee", "--dimensions", 8, "--epsilon", 1, *flags)
    assert done.status == 2
    assert because in done.refusal


def test_texts_become_vectors_with_their_guarantee_and_vectors_labels(run, corpus, tmp_path):
    out = tmp_path / "vectors.parquet"
    done = tell("represent", "encode", run / "device", corpus, "--out", out, "--carry", "label")
    assert done.status == 0, done.err
    there = read_vectors(out)
    assert there.vectors.shape == (12, 16)
    assert there.columns == {"label": LABELS * 6}
    assert there.record == VectorMechanism.from_record(there.record).record()
    for line in (
        "per coordinate",
        "pure",
        "(ε, δ)",
        "holds for",
        "1 vector of a text",
        "100 vectors",
    ):
        assert line in done.out
    mechanism = VectorMechanism.from_record(there.record)
    for who in ("one text", "one user"):
        (line,) = [
            line
            for line in done.out.splitlines()
            if f"Up to 3 of these vectors are of {who}" in line
        ]
        assert f"ε = {rounded_up(cost_of_texts(mechanism, 3))} " in line
        assert "for any other texts in their place" in line
    done = tell(
        "represent",
        "classify",
        run / "server",
        out,
        "--label",
        "label",
        "--out",
        tmp_path / "p.csv",
    )
    assert done.status == 0, done.err
    told = csv.read_csv(tmp_path / "p.csv").to_pydict()
    right = sum(one == other for one, other in zip(told["predicted"], LABELS * 6, strict=True))
    assert f"({right} of 12)" in done.out
    assert set(told) == {"label", "predicted", "probability"}


def test_nothing_of_the_text_is_in_the_file_or_on_the_screen(run, corpus, tmp_path):
    done = tell(
        "represent", "encode", run / "device", corpus, "--out", tmp_path / "v.parquet",
        "--mask", "anna", "--mask-column", "marks",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert read_vectors(tmp_path / "v.parquet").columns == {}
    for words in (b"anna", b"cat and"):
        assert words not in (tmp_path / "v.parquet").read_bytes()
        assert words.decode() not in done.out + done.err


def test_a_text_file_is_a_text_a_line(run, tmp_path):
    (tmp_path / "texts.txt").write_text("the cat\n\nthe dog ran\n", encoding="utf-8")
    done = tell("represent", "encode", run / "device", tmp_path / "texts.txt", "--out", tmp_path / "v.parquet")  # fmt: skip
    assert done.status == 0, done.err
    assert "3 vectors" in done.out
    assert "one user" not in done.out


def test_a_killed_encode_leaves_nothing_half_written(command, run, corpus, tmp_path):
    out = tmp_path / "out" / "vectors.parquet"
    done = command("represent", "encode", run / "device", corpus, "--out", out, die_before_rename=1)
    assert done.status == -9
    assert not out.exists()


def test_vectors_of_another_pair_or_damaged_ones_are_refused(run, corpus, tmp_path):
    write_halves(tmp_path / "other", seed=1)
    out = tmp_path / "vectors.parquet"
    tell("represent", "encode", tmp_path / "other" / "device", corpus, "--out", out)
    done = tell("represent", "classify", run / "server", out)
    assert done.status == 2
    assert "belong to the pair" in done.refusal
    out.write_bytes(out.read_bytes()[:200])
    assert "damaged" in tell("represent", "classify", run / "server", out).refusal
    done = tell("represent", "classify", run / "server", corpus)
    assert "states no guarantee" in done.refusal


# In Python


def test_several_releases_are_written_one_after_the_other_and_their_cost_with_them(run, tmp_path):
    encoded = tightlip.represent_encode(
        run / "device", ["the cat", "the dog"], out=tmp_path / "v.parquet", releases=3
    )
    there = read_vectors(tmp_path / "v.parquet")
    assert there.columns == {"release": [1, 1, 2, 2, 3, 3]}
    assert len(np.unique(there.vectors, axis=0)) == 6
    mechanism = VectorMechanism.from_record(there.record)
    assert there.record["releases"][0]["epsilon"] == cost_of_releases(mechanism, 3)[0]
    assert there.record["releases"][0]["any_two_texts"] == cost_of_texts(mechanism, 3)
    assert (encoded.most_of_one_text, encoded.most_of_one_user) == (3, None)


def test_vectors_of_one_user_are_counted_over_texts_and_releases(run):
    rows = [{"user": user, "text": f"cat {n}"} for n, user in enumerate("aab")]
    encoded = tightlip.represent_encode(run / "device", rows, releases=3)
    assert (encoded.most_of_one_text, encoded.most_of_one_user) == (3, 6)


@pytest.mark.parametrize("words", ["cat", ["cat"], {"cat"}])
def test_in_python_one_word_to_mask_or_any_collection_of_them_will_do(run, words):
    encoded = tightlip.represent_encode(run / "device", ["the cat", "a dog"], mask=words)
    assert encoded.masking.num_words == 1


def test_the_default_noise_of_a_guarantee_is_named_beside_that_of_training():
    flags = tell("represent", "guarantee", "--help").out
    assert all(name in flags for name in MECHANISMS)
    assert "`represent train` adds gaussian" in " ".join(flags.replace("│", " ").split())


def test_texts_that_are_read_as_the_same_are_counted_as_one(run):
    encoded = tightlip.represent_encode(run / "device", ["the cat", " the\u00a0 cat\n", "the dog"])
    assert encoded.most_of_one_text == 2


def test_what_a_users_texts_cost_together_is_never_that_of_texts_one_word_apart(tmp_path):
    """Masks of 95% make five releases of texts one word apart far cheaper than any five texts."""
    mechanism = write_halves(tmp_path, dropout=0.95, epsilon=0.3)
    rows = [{"user": "u", "text": f"cat {n}"} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    done = tell("represent", "encode", tmp_path / "device", tmp_path / "t.parquet", "--out", tmp_path / "v.parquet")  # fmt: skip
    whole, apart = cost_of_texts(mechanism, 5), cost_of_releases(mechanism, 5)[0]
    assert whole > apart + 1
    (line,) = [line for line in done.out.splitlines() if "of one user" in line]
    assert f"ε = {rounded_up(whole)} at" in line
    costs = [line for line in done.out.splitlines() if "vectors of a text" in line]
    assert len(costs) == 2
    for number, line in zip((10, 100), costs, strict=True):
        assert cost_of_releases(mechanism, number)[1] in line


def test_marks_are_told_by_number_and_those_found_nowhere_too(run, corpus, tmp_path):
    done = tell(
        "represent", "encode", run / "device", corpus, "--out", tmp_path / "v.parquet",
        "--mask", "Anna", "--mask", "zebra",
    )  # fmt: skip
    assert "3 words masked in 3 texts because they are marked; 1 found nowhere." in done.out
    done = tell("represent", "encode", run / "device", corpus, "--out", tmp_path / "v.parquet")
    assert "words masked in" not in done.out


def test_vectors_are_written_under_parquets_own_name_only(run, tmp_path):
    for name in ("t.csv", "t", "t.parquet.gz"):
        with pytest.raises(UsageError, match=r"end in \.parquet"):
            tightlip.represent_encode(run / "device", ["a"], out=tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_line_of_a_text_file_ends_at_a_line_feed_only(run, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes("the\u2028cat\r\nthe\x0cdog\x85\n\nlast".encode())
    assert len(tightlip.represent_encode(run / "device", path).vectors) == 4


def test_a_carried_release_is_never_overwritten(run):
    rows = [{"user": "a", "text": "x", "release": "beta"}]
    with pytest.raises(UsageError, match="Rename yours"):
        tightlip.represent_encode(run / "device", rows, carry=["release"], releases=2)
    once = tightlip.represent_encode(run / "device", rows, carry=["release"])
    assert once.columns == {"release": ["beta"]}


@pytest.mark.parametrize("cell", ["Anna’s", "b anna", ["x", "ANNA"]])
def test_a_column_that_holds_the_marked_words_is_not_carried(run, cell):
    rows = [{"user": "a", "text": "x anna", "about": cell, "m": ["anna"]}]
    rows.append({"user": "b", "text": "y boris", "about": "anna", "m": ["boris"]})
    given = {"carry": ["about"], "mask_column": "m"}
    with pytest.raises(UsageError, match="'about' holds a marked word in 1 of 2 rows"):
        tightlip.represent_encode(run / "device", rows, **given)


def test_a_vector_file_with_a_lowered_record_is_not_classified(run, corpus, tmp_path):
    """The record is that of more masking, sound in itself, and the digest is worked out anew."""
    out = tmp_path / "v.parquet"
    tell("represent", "encode", run / "device", corpus, "--out", out)
    there = read_vectors(out)
    record = VectorMechanism(
        mechanism="laplace-as-published", dimensions=16, epsilon=0.5, dropout=0.9
    ).record()
    assert record["epsilon"] < there.record["epsilon"]
    write_vectors(out, replace(there, record=record))
    done = tell("represent", "classify", run / "server", out)
    assert (done.status, done.out) == (2, "")
    assert "other noise" in done.refusal


def test_marked_words_come_from_the_call_a_file_and_a_column(run, tmp_path, monkeypatch):
    from tightlip.vectors import encode

    heard = []
    plain = encode.masked_texts
    monkeypatch.setattr(
        encode,
        "masked_texts",
        lambda texts, **given: heard.extend(given["marked"]) or plain(texts, **given),
    )
    (tmp_path / "marks.txt").write_text("Boris\n")
    rows = [
        {"user": "a", "text": "x y", "m": "x, z"},
        {"user": "b", "text": "x y", "m": None},
        {"user": "b", "text": "x y", "m": ["y"]},
    ]
    tightlip.represent_encode(
        run / "device", rows, mask=["Anna"], mask_file=tmp_path / "marks.txt", mask_column="m"
    )
    assert heard == [{"anna", "boris", "x", "z"}, {"anna", "boris"}, {"anna", "boris", "y"}]


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"carry": ["text"]}, "cannot be carried"),
        ({"carry": ["marks"], "mask_column": "marks"}, "cannot be carried"),
        ({"carry": ["labl"]}, "has no column 'labl'"),
        ({"mask_column": "label", "releases": 0}, "releases=0 is out of range"),
        ({"runtime": "tpu"}, "Unknown runtime"),
        ({"mask_file": "nowhere.txt"}, "does not exist"),
    ],
)
def test_what_cannot_be_encoded_is_refused(run, corpus, given, because):
    with pytest.raises(UsageError, match=because):
        tightlip.represent_encode(run / "device", corpus, **given)


def test_texts_alone_have_no_columns_and_none_at_all_are_refused(run):
    with pytest.raises(UsageError, match="texts alone"):
        tightlip.represent_encode(run / "device", ["a"], carry=["label"])
    with pytest.raises(UsageError, match="no text to encode"):
        tightlip.represent_encode(run / "device", [])


def test_labels_that_were_not_carried_cannot_be_compared(run, corpus, tmp_path):
    out = tmp_path / "vectors.parquet"
    tell("represent", "encode", run / "device", corpus, "--out", out)
    done = tell("represent", "classify", run / "server", out, "--label", "label")
    assert "carries no column 'label'" in done.refusal
    done = tell("represent", "classify", run / "server", out, "--out", tmp_path / "labels.xlsx")
    assert "Use .parquet or .csv" in done.refusal
