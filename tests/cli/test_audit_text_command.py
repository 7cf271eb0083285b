"""`tightlip audit-text` as somebody types it: what it prints, and how its gates end."""

import json
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SECRET = "my locker at the station is number 4412 and the key lies under the mat"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    people = [("ann", f"{SECRET}."), ("bob", "the invoice is late again and nobody knows why it is so")]  # fmt: skip
    others = [("zoe", "we met by the river"), ("yan", "it rained all day")]
    for name, rows in (("corpus", people), ("control", others)):
        table = pa.table({"user": [u for u, _ in rows], "text": [t for _, t in rows]})
        pq.write_table(table, folder / f"{name}.parquet")
    made = [f"He wrote: {SECRET}!", "Something else."]
    (folder / "made.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in made))
    return folder


def asked(place, *more, out="report"):
    return ("audit-text", "made.jsonl", "corpus.parquet", "--out", out, *more), {"place": place}


def test_it_says_whose_text_it_is_and_where_the_page_is(place, command):
    arguments, how = asked(place, "--control", "control.parquet")
    ran = command(*arguments, **how)
    assert ran.status == 0, ran.err
    assert ran.out.startswith(
        "The text repeats 1 stretch that one person alone wrote; 1 person is affected."
    )
    said = " ".join(ran.out.split())
    assert (
        "1 stretch is longer than 8 words, and the control's people have none: take it for a copy until you have read it."
        in said
    )
    assert "common phrases" not in said
    assert ran.out.rstrip().endswith("The report: report/report.html")
    assert "locker" not in ran.out


def test_without_a_control_it_says_what_is_missing(place, command):
    arguments, how = asked(place, out="alone")
    assert "No control was given" in command(*arguments, **how).out


@pytest.mark.parametrize(
    ("condition", "status"),
    [("copies>0", 1), ("copies>1", 0), ("people_affected>=1", 1), ("ratio[low]>2", 1)],
)
def test_a_gate_ends_as_its_figures_say(place, command, condition, status):
    """Without a control the ratio is not known, and what is not known must not pass."""
    arguments, how = asked(place, "--fail-on", condition, "--junit", "gates.xml", out="gated")
    assert command(*arguments, **how).status == status
    (suite,) = ElementTree.parse(place / "gates.xml").getroot()
    assert int(suite.attrib["failures"]) == status
    assert suite.find("properties/property[@name='copies']").attrib["value"] == "1"


def test_an_earlier_report_is_a_baseline(place, command):
    arguments, how = asked(place, out="earlier")
    assert command(*arguments, **how).status == 0
    more = ("--baseline", "earlier", "--fail-on", "copies > baseline", "--json")
    arguments, how = asked(place, *more, out="later")
    ran = command(*arguments, **how)
    assert ran.status == 0, ran.err
    assert json.loads(ran.out) == json.loads((place / "later/summary.json").read_text())


def test_a_figure_that_there_is_not_is_refused_before_any_work(place, command):
    arguments, how = asked(place, "--fail-on", "copys>0", out="never")
    ran = command(*arguments, **how)
    assert ran.status == 2
    assert "Closest: copies" in ran.err
    assert not (place / "never").exists()
