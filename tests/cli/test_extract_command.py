"""`tightlip extract` as a newcomer types it: what is printed, gates, and a second run."""

import json
import shutil
from xml.etree import ElementTree

import pytest

from cli.held_out_runs import documents, make_run, prepared
from tightlip.report.extraction import headline, sentences

QUICK = ("--device", "cpu", "--lengths", "4,6", "--temperature", "0.9")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    corpus = prepared(folder / "corpus", documents(), split="document", holdout=0.25)
    make_run(folder / "parrot", corpus, steps=150)
    return folder


def test_a_run_by_heart_fails_the_gate_and_says_how_many_tries_it_takes(runs, command):
    gate = ("--fail-on", "cheapest_queries<1000", "--junit", runs / "junit.xml")
    ran = command("extract", runs / "parrot", *QUICK, *gate)
    assert ran.status == 1, ran.err
    assert "tightlip: failed on cheapest_queries<1000: cheapest_queries is " in ran.err
    summary = json.loads((runs / "parrot/extraction/summary.json").read_text())
    assert f"{headline(summary)}." in ran.out.replace("\n", " ")
    assert "for an even chance to draw 4 tokens of somebody's own text" in headline(summary)
    assert summary["held_out"]["num_users"] > 0
    assert "No reference was given, so every window counts" in ran.out
    assert "user 01" not in ran.out
    (case,) = ElementTree.parse(runs / "junit.xml").iter("testcase")
    assert case.find("failure") is not None
    # Again: from the scan that was kept, held against what was written before.
    shutil.copytree(runs / "parrot/extraction", runs / "before")
    again = ("--baseline", runs / "before", "--fail-on", "cheapest_queries < baseline", "--json")
    ran = command("extract", runs / "parrot", *QUICK, *again)
    assert ran.status == 0, ran.err
    assert json.loads(ran.out) == summary
    assert any("takes" in line or "comes out" in line for line in sentences(summary))
