"""`tightlip.audit_text` on planted copies: whose they are, where, how often, and what chance does."""

import json
import math
import os
import random
import stat

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tightlip
from tightlip.core.errors import UsageError
from tightlip.report.synthetic import weighed

SECRET = "my locker at the station is number 4412 and the key lies under the mat"
PHRASE = "I hope this mail finds you well and in good health"


def corpus():
    return [
        ("ann", f"Dear all, {SECRET}. Ann"),
        ("ann", f"{PHRASE}. See you on Monday then."),
        ("bob", f"{PHRASE}. The invoice is late again."),
        ("cid", "We met by the river, and nobody spoke of the war that evening at all."),
    ]


def rows(report, name="stretches"):
    return report.table(name).to_pylist()


def test_a_copy_is_found_with_its_owner_its_place_and_how_often():
    texts = ["Nothing here.", f"So: {SECRET.upper()}!", f"{PHRASE}, he said.", f"{SECRET}"]
    report = tightlip.audit_text(texts, corpus(), near=0.0)
    (found,) = rows(report)
    assert found == {
        "text": SECRET.upper(), "written": None, "num_words": 15, "changes": 0, "times": 2,
        "rows": [1, 3], "first_word": 1, "owners": ["ann"], "users_in_control": None,
    }  # fmt: skip
    summary = report.summary
    assert (summary["copies"], summary["shared"], summary["people_affected"]) == (1, 1, 1)
    assert summary["copied_share"] == pytest.approx(30 / (2 + 16 + 13 + 15))
    assert summary["control"] is summary["ratio"] is summary["copies_not_in_control"] is None
    assert summary["copies_longer_than_control"] is summary["longest_alone"] is None
    assert rows(report, "documents") == [
        {"row": 1, "stretches": 1, "longest": 15},
        {"row": 3, "stretches": 1, "longest": 15},
    ]
    assert [(row["user"], row["copies"], row["longest"]) for row in rows(report, "users")] == [
        ("ann", 1, 15), ("bob", 0, 0), ("cid", 0, 0),
    ]  # fmt: skip


def test_case_marks_and_spacing_make_no_difference():
    text = "WE met,\n\n by the river; and (nobody) spoke -- of the war that EVENING at all"
    (found,) = rows(tightlip.audit_text([text], corpus()))
    assert (found["owners"], found["num_words"], found["changes"]) == (["cid"], 15, 0)
    assert found["text"] == text


def test_a_copy_with_a_digit_changed_is_a_near_copy_shown_beside_what_was_written():
    report = tightlip.audit_text([SECRET.replace("4412", "4413")], corpus())
    near = [row for row in rows(report) if row["changes"]]
    assert [(row["num_words"], row["changes"], row["owners"]) for row in near] == [(15, 1, ["ann"])]
    assert (near[0]["text"], near[0]["written"]) == (SECRET.replace("4412", "4413"), SECRET)
    assert report.summary["near_copies"] == 1
    assert report.summary["longest_near"] == 15


def test_a_text_with_two_owners_is_both_peoples():
    table = [{"user": ["ann", "bob"], "text": SECRET}, {"user": ["cid"], "text": PHRASE}]
    report = tightlip.audit_text([SECRET, PHRASE], table)
    assert {row["text"]: row["owners"] for row in rows(report)} == {
        SECRET: ["ann", "bob"], PHRASE: ["cid"],
    }  # fmt: skip
    assert report.summary["people_affected"] == 3


def test_chats_are_read_by_what_is_said_in_them(tmp_path):
    chat = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": "Noted."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"user": "ann", "messages": chat}) + "\n")
    (tmp_path / "made.jsonl").write_text(json.dumps({"messages": chat[:1], "user": "x"}) + "\n")
    for synthetic in ([SECRET], tmp_path / "made.jsonl"):
        (found,) = rows(tightlip.audit_text(synthetic, tmp_path / "chats.jsonl"))
        assert (found["owners"], found["text"]) == (["ann"], SECRET)


def test_rows_of_tokens_are_refused():
    with pytest.raises(UsageError, match="nobody knows their text"):
        tightlip.audit_text([SECRET], [{"user": "ann", "input_ids": [1, 2, 3]}])


def test_a_file_of_generated_text_needs_no_users(tmp_path):
    pq.write_table(pa.table({"text": [SECRET, PHRASE]}), tmp_path / "made.parquet")
    report = tightlip.audit_text(tmp_path / "made.parquet", corpus())
    assert report.summary["copies"] == 1


# Beside people who were not in


def test_what_the_control_wrote_too_does_not_count_in_the_comparison():
    control = [("dan", f"{PHRASE}."), ("eve", "Nothing else was written by me in all of these years.")]  # fmt: skip
    mine = [row for row in corpus() if row[0] != "bob"]
    report = tightlip.audit_text([PHRASE, SECRET], mine, control=control, num_bootstraps=100)
    assert report.summary["copies"] == 2
    assert report.summary["copies_not_in_control"] == 1
    assert {row["text"]: row["users_in_control"] for row in rows(report)} == {PHRASE: 1, SECRET: 0}
    assert report.summary["control"]["copies"] == 1  # dan alone wrote it there
    assert report.summary["control"]["per_thousand_words"]["value"] == 0


def test_rates_are_copies_by_words_and_the_ratio_is_theirs():
    draw = np.random.default_rng(0)

    def people(prefix, num):
        return [(f"{prefix}{n}", " ".join(f"w{w}" for w in draw.integers(0, 5000, 40))) for n in range(num)]  # fmt: skip

    mine, control = people("in", 30), people("out", 20)
    texts = [text for _, text in mine[:12]] + [text for _, text in control[:2]]
    summary = tightlip.audit_text(texts, mine, control=control).summary
    assert summary["per_thousand_words"]["value"] == pytest.approx(1000 * 12 / (30 * 40))
    assert summary["control"]["per_thousand_words"]["value"] == pytest.approx(1000 * 2 / 800)
    assert summary["ratio"]["value"] == pytest.approx((12 / 1200) / (2 / 800))
    assert summary["expected"]["value"] == pytest.approx(2 / 800 * 1200)
    assert summary["share_affected"]["value"] == pytest.approx(0.4)
    # The binomial law's standard error, which draws of equal people have.
    low, high = summary["share_affected"]["low"], summary["share_affected"]["high"]
    assert (high - low) / 3.92 == pytest.approx((0.4 * 0.6 / 30) ** 0.5, rel=0.2)
    assert 1 < summary["ratio"]["low"] < summary["ratio"]["value"]


def made_up_people(draw, prefix, num):
    """People of very different length, who say common phrases and their own words."""
    phrases = [" ".join(f"p{draw.randrange(60)}" for _ in range(10)) for _ in range(80)]
    return [
        (f"{prefix}{n}", " ".join(draw.choice(phrases) if draw.random() < 0.3 else f"w{draw.randrange(3000)}"
                                  for _ in range(int(5 * draw.paretovariate(1.2)) + 3)))
        for n in range(num)
    ]  # fmt: skip


def test_of_people_whom_the_text_never_saw_ratio_and_lengths_say_chance():
    """In at most 3 of 20 made-up worlds does the interval lie beside 1, or a length accuse."""
    beside = by_length = with_copies = 0
    for seed in range(20):
        draw = random.Random(seed)
        everybody = made_up_people(draw, "u", 120)
        phrases = [text for _, text in draw.sample(everybody, 40)]
        words = " ".join(phrases).split()
        texts = [" ".join(words[at : at + 30]) for at in range(0, len(words) - 30, 15)]
        draw.shuffle(everybody)
        report = tightlip.audit_text(texts, everybody[:70], control=everybody[70:], num_bootstraps=200, near=0.0)  # fmt: skip
        ratio = report.summary["ratio"]
        with_copies += report.summary["copies"] > 5
        beside += ratio["low"] > 1 or (ratio["high"] is not None and ratio["high"] < 1)
        by_length += report.summary["by_length"]["p_value"] < 0.05
    assert with_copies == 20
    assert beside <= 3
    assert by_length <= 3


def test_a_control_without_any_gives_a_lower_end():
    mine = [(f"in{n}", " ".join(f"w{n}x{w}" for w in range(20))) for n in range(40)]
    control = [(f"out{n}", " ".join(f"v{n}x{w}" for w in range(20))) for n in range(40)]
    summary = tightlip.audit_text([text for _, text in mine], mine, control=control).summary
    high = summary["control"]["per_thousand_words"]["high"]
    # Clopper and Pearson's upper end of none in 40, each with one.
    assert high == pytest.approx((1 - 0.025 ** (1 / 40)) * 40 / 0.8)
    assert summary["ratio"]["value"] is None
    assert summary["ratio"]["low"] == pytest.approx(summary["per_thousand_words"]["low"] / high)


@pytest.mark.parametrize(("num_copied", "has_end"), [(1, False), (30, True)])
def test_a_corpus_without_any_gives_an_upper_end(num_copied, has_end):
    """None against a few is no sign of a wrong control; none against most is."""
    mine = [(f"in{n}", " ".join(f"w{n}x{w}" for w in range(20))) for n in range(40)]
    control = [(f"out{n}", " ".join(f"v{n}x{w}" for w in range(20))) for n in range(40)]
    texts = [text for _, text in control[:num_copied]]
    summary = tightlip.audit_text(texts, mine, control=control).summary
    ratio, rate = summary["ratio"], summary["per_thousand_words"]["high"]
    assert (ratio["value"], ratio["low"]) == (0, 0)
    assert rate == pytest.approx(
        (1 - 0.025 ** (1 / 40)) * 40 / 0.8
    )  # Clopper and Pearson's, none in 40
    least = summary["control"]["per_thousand_words"]["low"]
    assert ratio["high"] == (pytest.approx(rate / least) if has_end else None)
    assert ("is the control of the same kind" in weighed(summary)) == has_end


def documents_of_40_words(prefix, num_people):
    """Three documents of each person, no word of them twice."""
    return [
        (f"{prefix}{n}", " ".join(f"{prefix}{n}d{document}w{w}" for w in range(40)))
        for n in range(num_people)
        for document in range(3)
    ]


@pytest.mark.parametrize("near", [0.0, 0.1])
def test_whole_documents_of_one_person_are_not_called_common_phrases(near):
    """Three of 40 words; a rate over 30 people cannot tell so few from chance, their length does."""
    mine, control = documents_of_40_words("in", 30), documents_of_40_words("out", 30)
    texts = [text.replace("w20 ", "other " if near else "w20 ") for _, text in mine[:3]]
    report = tightlip.audit_text(texts, mine, control=control, near=near, num_bootstraps=100)
    summary = report.summary
    assert summary["ratio"]["low"] < 1
    assert (summary["longest_alone"], summary["control"]["longest_alone"]) == (40, 0)
    # With a word changed in the middle each document is a near copy that holds two copies.
    num = 9 if near else 3
    assert summary["copies_longer_than_control"] == num
    assert report.failed("copies_longer_than_control>0")
    said = weighed(summary)
    assert "common phrases" not in said
    assert "of the control's people the text has nothing word for word" in said
    assert "Of the corpus' people 3.3% have a copy or a near copy, of the control's 0%." in said
    assert f"{num} stretches are longer than 8 words, and the control's people have none: take these for copies until you have read them." in said  # fmt: skip


@pytest.mark.parametrize("planted", [False, True])
def test_phrases_as_long_as_the_controls_are_called_common_and_longer_ones_are_not(planted):
    """Of every third person on both sides the text has nine words, and of one perhaps a document."""
    mine, control = documents_of_40_words("in", 30), documents_of_40_words("out", 30)
    texts = [" ".join(text.split()[:9]) for _, text in mine[::9] + control[::9]]
    texts += [mine[1][1]] * planted
    report = tightlip.audit_text(texts, mine, control=control, num_bootstraps=100)
    summary, said = report.summary, weighed(report.summary)
    assert summary["ratio"]["low"] < 1 < summary["ratio"]["high"]
    assert summary["control"]["longest_alone"] == 9
    assert summary["copies_longer_than_control"] == planted
    assert bool(report.failed("copies_longer_than_control>0")) is planted
    assert ("may be no more than common phrases" in said) is not planted
    alone = "1 stretch is longer than any that is the control's people's alone (longest 9 words): take it for a copy until you have read it."
    assert (alone in said) is planted


def test_one_quotation_in_the_control_hides_no_copy_and_two_are_a_yardstick():
    """Whole documents of one person in the corpus; of the control's a poem that two people own."""
    mine, control = documents_of_40_words("in", 30), documents_of_40_words("out", 30)
    poems = [" ".join(f"{name}{w}" for w in range(90)) for name in ("p", "q")]
    short = [" ".join(text.split()[:9]) for _, text in mine[::9] + control[::9]]
    for owners, longer in (([["out0", "out1"]], 3), ([["out0"], ["out4"]], 0)):
        others = [*control, *zip(owners, poems, strict=False)]
        rows = [{"user": [user] if isinstance(user, str) else user, "text": text} for user, text in others]  # fmt: skip
        texts = [*short, *poems, *(text for _, text in mine[3:6])]
        report = tightlip.audit_text(texts, mine, control=rows, num_bootstraps=100)
        summary, said = report.summary, weighed(report.summary)
        assert summary["control"]["longest_alone"] == 90
        assert summary["control"]["longest_but_one"] == (9 if longer else 90)
        assert summary["copies_longer_than_control"] == longer
        assert ("(longest 9 words, but for one person with 90 words)" in said) is bool(longer)
        assert ("may be no more than common phrases" in said) is not longer


def test_copies_of_many_people_are_told_by_their_length_whatever_the_control_quotes():
    """Chance phrases of everybody hide a rate; at 32 words they are gone, but for four who quote."""
    mine, control = documents_of_40_words("in", 40), documents_of_40_words("out", 40)
    said_by = random.Random(0).choices(range(80), k=60)
    phrases = [" ".join((mine + control)[3 * each + 2][1].split()[:9]) for each in said_by]
    quoted = [text for _, text in control[::30]]
    leaked = [text for _, text in mine[1::6]]
    report = tightlip.audit_text(phrases + quoted + leaked, mine, control=control, near=0.0, num_bootstraps=100)  # fmt: skip
    summary, said = report.summary, weighed(report.summary)
    assert summary["ratio"]["low"] < 1 < summary["ratio"]["high"]
    assert summary["copies_longer_than_control"] == 0
    found = summary["by_length"]
    assert (found["words"], found["people"], found["control"]) == (16, 20, 4)
    # By hand: six lengths, and 20 or more heads in 24 throws of a fair coin.
    tail = sum(math.comb(24, heads) for heads in range(20, 25)) / 2**24
    assert found["p_value"] == pytest.approx(6 * tail)
    assert report.failed("by_length[p_value]<0.05")
    assert "20 people in the corpus and 4 in the control have a stretch of 16 words or more" in said
    assert "common phrases" not in said


def test_a_long_text_that_the_control_has_too_is_no_yardstick():
    """Nor does it count as longer: it is on both sides, and what is on both counts on neither."""
    mine, control = documents_of_40_words("in", 2), documents_of_40_words("out", 2)
    both = " ".join(f"b{w}" for w in range(60))
    sides = [[*mine, ("in0", both)], [*control, ("out0", both)]]
    report = tightlip.audit_text([both, mine[0][1]], sides[0], control=sides[1], num_bootstraps=100)
    assert report.summary["longest"] == 60
    assert report.summary["longest_alone"] == 40
    assert report.summary["copies_longer_than_control"] == 1


def test_people_of_the_corpus_are_no_control():
    with pytest.raises(UsageError, match="1 of the control's 2 people are in the corpus too"):
        tightlip.audit_text([SECRET], corpus(), control=[("ann", "x"), ("zoe", "y")])


# The report's folder


def test_redacted_it_holds_no_text_and_no_names(tmp_path):
    mine = [(f"{user} Smith", text) for user, text in corpus()]
    texts = [SECRET, SECRET.replace("4412", "4413")]
    report = tightlip.audit_text(texts, mine, out=tmp_path / "r", redact=True)
    assert report.summary["copies"] > 0
    assert report.summary["corpus_fingerprint"] is None
    for path in (tmp_path / "r").iterdir():
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content = json.dumps(pq.read_table(path).to_pylist()).encode()
        for private in (b"locker", b"Smith", b"4412"):
            assert private not in content, path
    assert {name for row in rows(report) for name in row["owners"]} == {"user 1"}
    with pytest.raises(UsageError, match="holds a report with no text"):
        tightlip.audit_text(texts, mine, out=tmp_path / "r")


def test_its_files_are_its_owners_and_nothing_else_is_left(tmp_path):
    tightlip.audit_text([SECRET], corpus(), out=tmp_path / "r")
    names = {path.name for path in (tmp_path / "r").iterdir()}
    tables = {"stretches.parquet", "users.parquet", "documents.parquet"}
    assert names == {*tables, "summary.json", "report.html", ".tightlip.sha256"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "r").iterdir()} == {0o600}
    assert stat.S_IMODE(os.stat(tmp_path / "r").st_mode) == 0o700


def test_other_files_and_other_reports_are_not_written_among(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/sequences.parquet").write_bytes(b"")
    with pytest.raises(UsageError, match="holds other files"):
        tightlip.audit_text([SECRET], corpus(), out=tmp_path / "r")
    with pytest.raises(UsageError, match="nobody knows"):
        tightlip.audit_text([SECRET], [{"user": "a", "input_ids": [1]}], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_nothing_to_find_is_said_and_not_an_error():
    for texts in (
        ["", "!"],
        ["short"],
        ["no words of theirs stand in here at all, not one of them"],
    ):
        summary = tightlip.audit_text(texts, corpus(), control=[("z", ""), ("y", "a b")]).summary
        assert summary["copies"] == summary["near_copies"] == summary["people_affected"] == 0
