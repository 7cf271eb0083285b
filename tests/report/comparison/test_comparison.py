"""Rows, verdicts, table and CSV of a comparison, from figures known beforehand."""

import csv
import io
import json
import random
import re
from dataclasses import asdict
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from report.comparison.runs import (
    NO_PROMISE,
    OWNERS,
    PROVED,
    REAL,
    SECRETS,
    exposures,
    measured,
    membership,
    repeated,
    with_perplexity,
)
from report.samples import Reader
from tightlip.audit.compared import Matching, change_of, compared
from tightlip.core.errors import UsageError
from tightlip.report.comparison import (
    ONE_TRAINING,
    clearly_less,
    headline,
    missing,
    uncounted,
)
from tightlip.report.comparison.table import (
    MOST_REPETITIONS,
    chosen_repetitions,
    comparison_table,
    csv_text,
    terminal_tables,
)
from tightlip.report.kit import render_page

MATCHING = Matching()


def rows_of(*runs, matching=MATCHING):
    return compared(runs, matching)


def cells(rows, name):
    (line,) = [line for line in comparison_table(rows).rows if line.name == name]
    return [cell.value for cell in line.cells]


def page_of(rows, matching=MATCHING, **others):
    return render_page("comparison", rows=rows, **asdict(matching), **others)


def printed(rows, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for table in terminal_tables(rows, width):
        console.print(table)
    return console.file.getvalue()


# Rows


def test_exposure_is_the_mean_over_planted_canaries_of_one_repetition_count():
    (row, _) = rows_of(measured(), with_perplexity("triplet", 151))
    assert row["exposure"] == [
        {"repetitions": 1, "num_canaries": 2, "mean_bits": 1.5, "num_exposed": 0},
        {"repetitions": 10, "num_canaries": 2, "mean_bits": 12.5, "num_exposed": 2},
    ]
    assert cells([row], "Exposure, 10× (bits)") == ["12.5"]
    assert cells([row], "Exposed (> 6.3 bits)") == ["2 of 4"]


def test_an_exposure_is_called_so_by_the_low_end_of_its_interval():
    one = exposures([1.0, 12.0, 2.0, 13.0])
    one[1] |= {"low": 6.0}
    (row, _) = rows_of(measured(exposures=one), with_perplexity("b", 151))
    assert row["exposure"][1]["num_exposed"] == 1


def test_of_spaces_too_small_for_exposure_nothing_is_counted_as_unexposed():
    rows = rows_of(measured(exposures=exposures([6.5] * 4, space=90)), with_perplexity("b", 151))
    assert [one["num_exposed"] for one in rows[0]["exposure"]] == [2, 2]
    rows = rows_of(measured(exposures=exposures([6.2] * 4, space=75)), with_perplexity("b", 151))
    assert [one["num_exposed"] for one in rows[0]["exposure"]] == [None, None]
    assert cells([rows[0]], "Exposed (> 6.3 bits)") == ["cannot show"]
    assert "0 of" not in printed([rows[0]]).split("Exposed")[1].splitlines()[0]


def test_tab_counts_planted_and_real_canaries_apart_and_says_how_many_can_succeed():
    (row, _) = rows_of(measured(), with_perplexity("triplet", 151))
    assert row["tab"] == {
        "planted": {"successes": 2, "num_canaries": 4, "ceiling": 3},
        "real": {"successes": 0, "num_canaries": 1, "ceiling": 1},
    }


def test_two_people_with_one_text_can_both_be_completed():
    one = repeated([12.0])[0] | {"tab": True}
    (row, _) = rows_of(measured(exposures=[one, one | {"user": "Olivia"}]), measured("b"))
    assert row["tab"]["planted"] == {"successes": 2, "num_canaries": 2, "ceiling": 2}


@given(seed=st.integers(0, 10**9))
@pytest.mark.parametrize("num", [2, 3, 8])
def test_the_change_in_exposure_is_a_paired_t_test(seed, num):
    draw = random.Random(seed)
    before, after = ([draw.uniform(0, 13) for _ in range(num)] for _ in range(2))
    others = exposures([1, 2, 3, 4])[:1]  # planted once: not the most repeated
    change = change_of(repeated(after) + others, repeated(before) + others)
    oracle = stats.ttest_rel(after, before, alternative="two-sided").confidence_interval(0.95)
    assert (change["low"], change["high"]) == pytest.approx(tuple(oracle))
    assert (change["repetitions"], change["num_canaries"]) == (10, num)
    p_value = stats.ttest_rel(after, before, alternative="less").pvalue
    assert change["p_value"] == (None if num < 3 else pytest.approx(p_value))


def test_canaries_that_all_change_alike_tell_nothing_of_luck():
    assert (
        change_of(repeated([4.1, 5.1, 6.1, 7.1]), repeated([8.4, 9.4, 10.4, 11.4]))["p_value"]
        is None
    )
    assert change_of(repeated([4.0]), []) is None


def rejected_by_closed_testing(values, alpha=0.025):
    """Oracle: one is rejected if Bonferroni rejects every set of hypotheses that it is in."""
    places = range(len(values))
    every = [set(one) for size in places for one in combinations(places, size + 1)]
    return {
        place
        for place in places
        if all(min(values[p] for p in one) <= alpha / len(one) for one in every if place in one)
    }


@given(seed=st.integers(0, 10**9))
def test_several_runs_are_held_against_the_baseline_by_holm(seed):
    draw = random.Random(seed)
    values = [draw.choice([0.001, 0.006, 0.03, 0.2]) * draw.random() * 2 for _ in range(5)]
    changes = {str(place): {"p_value": value} for place, value in enumerate(values)}
    assert clearly_less(changes) == {str(place) for place in rejected_by_closed_testing(values)}
    with_unknown = changes | {"unknown": None, "few": {"p_value": None}}
    assert clearly_less(with_unknown) <= clearly_less(changes)


def test_what_is_not_known_is_none_and_never_0():
    reason = "The run holds out no text."
    bare = measured(
        "bare", held_out_text=None, groups=None, membership=None, exposures=None, leakage=None,
        seconds_per_epoch=None, exposed_above_bits=None, not_known={"perplexity": reason},
    )  # fmt: skip
    rows = rows_of(measured(), bare)
    row = rows[1]
    for name in (
        "perplexity",
        "leaks",
        "unique",
        "leakage_epsilon",
        "gap",
        "membership",
        "comparable",
    ):
        assert row[name] is None, name
    assert row["exposure"] == []
    assert row["seconds_per_epoch"] is None
    assert row["verdicts"] == [f"Its utility is not known. {reason}"]
    for line in comparison_table(rows).rows:
        if line.name not in ("Model", "Guarantee"):
            assert line.cells[1].value == "not known", line.name


def test_a_perplexity_without_an_interval_comes_from_the_leakage_report():
    (row, _) = rows_of(measured(groups=None), with_perplexity("b", 150))
    assert row["perplexity"] == {"value": 150.0, "low": None, "high": None}


def test_seconds_are_held_against_the_baseline():
    rows = rows_of(measured(), with_perplexity("slow", 150, seconds_per_epoch=25.0))
    assert [row["times_baseline"] for row in rows] == [1.0, 2.5]


def test_ez_leads_where_every_run_has_it_with_the_share_found():
    both = [measured(membership=membership(0.8, reference=0.9, ez=0.95))]
    second = membership(0.6, reference=0.7, ez=0.75)
    rows = rows_of(*both, with_perplexity("b", 150, membership=second))
    assert cells(rows, "Membership AUC (EZ)") == ["0.95", "0.75"]
    assert cells(rows, "Found at 1%") == ["55%", "35%"]
    second = membership(0.6, reference=0.7)
    rows = rows_of(*both, with_perplexity("b", 150, membership=second))
    assert cells(rows, "Membership AUC (reference)") == ["0.90", "0.70"]


def test_the_reference_score_is_shown_only_where_every_run_has_it():
    both = [measured(membership=membership(0.8, reference=0.9))]
    rows = rows_of(*both, with_perplexity("b", 150, membership=membership(0.6, reference=0.7)))
    assert cells(rows, "Membership AUC (reference)") == ["0.90", "0.70"]
    rows = rows_of(*both, with_perplexity("b", 150, membership=membership(0.6)))
    assert cells(rows, "Membership AUC (min-k%)") == ["0.79", "0.59"]


# The standing


def test_epsilon_is_there_only_beside_its_standing():
    liar = NO_PROMISE | {"epsilon": 2.71828, "delta": 1e-5}
    rows = rows_of(measured(guarantee=liar), with_perplexity("dp", 151, guarantee=PROVED))
    assert [row["guarantee"]["epsilon"] for row in rows] == [None, 3.14159]
    page = page_of(rows, MATCHING)
    assert cells(rows, "Guarantee") == [
        "none (measured only)",
        "ε = 3.15 at δ = 1e-05, per user (proved; arithmetic not recorded)",
    ]
    for text in (page, csv_text(rows), printed(rows)):
        assert "2.71" not in text
        assert "2.72" not in text
        assert "proved" in text
        assert "measured" in text


def test_an_insecure_seed_is_said_wherever_the_epsilon_is():
    insecure = PROVED | {"insecure_seed": True}
    rows = rows_of(measured(), with_perplexity("dp", 151, guarantee=insecure))
    assert "insecure seed" in printed(rows)
    assert "this ε protects nobody" in page_of(rows, MATCHING)


# Verdicts


@pytest.mark.parametrize(
    ("perplexity", "matched"), [(157, True), (143, True), (158, False), (142, False)]
)
def test_runs_match_within_the_tolerance_and_not_beyond(perplexity, matched):
    row = rows_of(measured(), with_perplexity("b", perplexity))[1]
    assert row["comparable"] is matched
    (said,) = row["verdicts"]
    assert f"{perplexity} against 150" in said
    assert said.startswith("Comparable" if matched else "Not comparable at matched utility")


@pytest.mark.parametrize("perplexities", [(150.04, 312.2), (312.2, 150.04), (3.3333, 9.1119)])
def test_the_advice_names_a_perplexity_that_both_can_reach(perplexities):
    base, other = (with_perplexity(name, p) for name, p in zip("ab", perplexities, strict=True))
    (said,) = rows_of(base, other)[1]["verdicts"]
    targets = {float(number) for number in re.findall(r"perplexity (\d[\d.]*\d|\d)", said)}
    assert len(targets) == 1
    assert max(perplexities) <= targets.pop() <= 1.01 * max(perplexities)
    assert f"train {'a' if perplexities[0] < perplexities[1] else 'b'} with" in said


def test_a_private_run_is_not_told_to_stop_by_private_text():
    base = with_perplexity("worse", 300)
    (said,) = rows_of(base, with_perplexity("dp", 150, mitigation="dp"))[1]["verdicts"]
    assert "--until-perplexity" not in said
    assert "--at-perplexity 300" in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokenizer": "bpe"}, "other tokens than plain"),
        ({"held_out_text": "another"}, "held-out text is not that of plain"),
    ],
)
def test_perplexities_on_other_scales_are_not_compared(changed, words):
    rows = rows_of(measured(), with_perplexity("b", 150, **changed))
    assert rows[1]["comparable"] is False
    assert words in rows[1]["verdicts"][0]
    assert "only leakage can be compared" in rows[1]["verdicts"][0]
    assert rows[1]["same_held_out"] is False
    visible = Reader(page_of(rows)).visible
    assert "1 model without a perplexity on the baseline's held-out text cannot be drawn" in visible


def test_other_training_text_is_said_to_be_so():
    row = rows_of(measured(), with_perplexity("b", 150, train_text="other"))[1]
    assert row["comparable"] is False
    assert row["verdicts"][0].startswith("Comparable at matched utility")
    assert row["verdicts"][1].startswith("Trained on other text or other canaries than plain")


def test_a_run_that_never_got_there_is_listed_and_not_compared():
    matching = Matching(at_perplexity=150)
    gone = with_perplexity(
        "dp", 1, model=None, groups=None, leakage=None, exposures=None, best_perplexity=718.0
    )
    rows = rows_of(measured(), gone, matching=matching)
    assert rows[1]["comparable"] is False
    assert rows[1]["verdicts"] == [
        "No snapshot reached a validation perplexity of 150; its lowest is 718, so there is nothing to compare."
    ]
    assert "its lowest is 718" in Reader(page_of(rows, matching)).visible


def test_snapshots_too_far_apart_are_told_to_be_made_more_often():
    row = rows_of(measured(), with_perplexity("b", 90), matching=Matching(at_perplexity=160))[1]
    assert "--snapshot-steps" in row["verdicts"][0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"tolerance": 5}, "tolerance=5 is out of range"), ({"at_perplexity": 0.5}, "above 1")],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Matching(**settings)


# The one sentence


LOUD = [12.0, 13.0, 11.5, 12.5, 13.5]


def lower(by, jitter=0.2):
    """The same canaries, so many bits lower, each by a little more or less."""
    return repeated([bits - by + jitter * (place % 3 - 1) for place, bits in enumerate(LOUD)])


def test_the_quietest_is_named_if_it_is_clearly_below_all_others():
    base = measured(exposures=repeated(LOUD))
    loud = with_perplexity("b", 150, exposures=lower(0.3, jitter=0.6))
    quiet = with_perplexity("c", 152, exposures=lower(8))
    untrained = with_perplexity("d", 700, exposures=lower(12))
    sentence, more = headline(rows_of(base, loud, quiet, untrained))
    assert sentence == "At matched utility, c gives away least."
    assert "4.46 bits in c, 12.5 bits in plain" in more
    assert "Not comparable: d." in more
    assert ONE_TRAINING in more


def test_of_two_that_cannot_be_told_apart_neither_gives_away_least():
    base = measured(exposures=repeated(LOUD))
    two = [
        with_perplexity("b", 150, exposures=lower(8)),
        with_perplexity("c", 150, exposures=lower(8.1, 0.6)),
    ]
    sentence, more = headline(rows_of(base, *two))
    assert sentence == "At matched utility, c and b give away less than plain."
    assert "Which of the 2 matched models gives away least is not clear." in more
    assert ONE_TRAINING in more


def test_one_quieter_run_is_held_against_the_baseline_alone():
    rows = rows_of(
        measured(exposures=repeated(LOUD)), with_perplexity("b", 150, exposures=lower(8))
    )
    assert headline(rows)[0] == "At matched utility, b gives away less than plain."


@pytest.mark.parametrize("num_runs", [1, 3, 7])
@pytest.mark.parametrize("num_canaries", [2, 3, 6])
def test_runs_that_do_not_differ_are_seldom_told_apart_however_many_there_are(
    num_runs, num_canaries
):
    draw = random.Random(num_runs)
    claimed = 0
    for _ in range(200):
        drawn = [
            repeated([13.3 - draw.expovariate(0.7) for _ in range(num_canaries)])
            for _ in range(num_runs + 1)
        ]
        runs = [
            with_perplexity(f"r{place}", 150, exposures=one) for place, one in enumerate(drawn[1:])
        ]
        said = headline(rows_of(measured(exposures=drawn[0]), *runs))[0]
        claimed += "no model" not in said
    assert claimed / 200 <= 0.05


def test_a_difference_that_may_be_luck_is_no_difference():
    lucky = with_perplexity("b", 150, exposures=lower(1, jitter=3))
    sentence, more = headline(rows_of(measured(exposures=repeated(LOUD)), lucky))
    assert sentence == "At matched utility, no model clearly gives away less than plain."
    assert "5 canaries cannot tell that from chance." in more


def test_two_canaries_prove_nothing():
    quiet = with_perplexity("b", 150, exposures=exposures([1, 4, 2, 5.1]))
    sentence, more = headline(rows_of(measured(), quiet))
    assert sentence == "At matched utility, no model clearly gives away less than plain."
    assert "2 canaries cannot tell that from chance; it takes 3 or more." in more


def test_a_louder_run_is_no_gain():
    louder = with_perplexity("b", 150, exposures=exposures([1, 13, 2, 13]))
    assert headline(rows_of(measured(), louder))[0] == (
        "At matched utility, no model gives away less than plain."
    )


def test_without_a_match_nobody_wins():
    sentence, more = headline(rows_of(measured(), with_perplexity("dp", 700)))
    assert sentence.startswith("No model is comparable to plain at matched utility")
    assert "from 150 to 700" in more


def test_without_canaries_counts_are_told_and_nobody_wins():
    leakage = {"leaks": 1, "people_affected": 1, "unique": 90, "users_with_unique": 12}
    rows = rows_of(
        measured(exposures=None), with_perplexity("b", 150, exposures=None, leakage=leakage)
    )
    sentence, more = headline(rows)
    assert sentence.startswith("At matched utility, only counts are known")
    assert "only one person wrote" in more
    assert "9 leaks of 3 people in plain, 1 leak of 1 person in b" in more


def test_bits_are_never_held_against_counts():
    """Two leaks are no less than 12.5 bits."""
    leakage = {"leaks": 2, "people_affected": 1, "num_users": 12, "leakage_epsilon": None}
    unmeasured = with_perplexity("b", 150, exposures=None, leakage=leakage)
    assert "give away is not known" in headline(rows_of(measured(), unmeasured))[0]
    sentence, more = headline(rows_of(measured(exposures=None), with_perplexity("b", 150)))
    assert "only counts are known" in sentence
    assert "bits" not in more


def test_reasons_are_told_once_for_all_runs_that_share_them():
    runs = [
        measured("a", not_known={"exposure": "No key.", "tab": "No key."}),
        with_perplexity(
            "b", 150, not_known={"exposure": "No key.", "tab": "No key.", "time": "x."}
        ),
    ]
    assert missing(rows_of(*runs)) == [
        "Exposure and tab: not known. No key.",
        "Time of b: not known. x.",
    ]


def test_what_membership_does_not_see_is_said_on_the_page_and_in_the_csv():
    hidden = membership(0.6) | {"not_counted": {"num_documents": 233, "num_tokens": 4800}}
    rows = rows_of(
        measured(membership=hidden), with_perplexity("b", 150, membership=hidden), measured("c")
    )
    (sentence,) = uncounted(rows)
    assert sentence.startswith("Membership of plain and b: 233 documents, 4,800 tokens not counted")
    assert sentence in Reader(page_of(rows, MATCHING)).visible
    first, _, third = csv.DictReader(io.StringIO(csv_text(rows)))
    assert first["membership_num_documents_not_counted"] == "233"
    assert first["membership_num_tokens_not_counted"] == "4800"
    assert third["membership_num_tokens_not_counted"] == ""


# The table


def test_leaks_come_before_what_is_unique_by_tokens_each_with_its_people():
    old = {"unique": 25, "users_with_unique": 4}  # a report of 0.1 counted tokens only
    rows = rows_of(measured(), with_perplexity("b", 150, leakage=old))
    lines = comparison_table(rows).rows
    names = [line.name for line in lines]
    assert names.index("Unique by tokens") == names.index("Leaks") + 1
    leaks, by_tokens = (lines[names.index(name)].cells for name in ("Leaks", "Unique by tokens"))
    assert [(cell.value, cell.under) for cell in leaks] == [("9", "of 3 people"), ("not known", "")]
    assert [(cell.value, cell.under) for cell in by_tokens] == [("25", "of 4 people")] * 2
    assert "leaks,people_affected,unique,users_with_unique," in csv_text(rows)
    page = page_of(rows)
    assert "validation perplexity 150, 9 leaks" in page
    assert page.count("9 leaks") == 1  # of b, which has no leaks to draw, there is no mark


def test_a_row_that_is_no_run_is_shown_like_any_other():
    model = measured("m", mitigation="not known", seconds_per_epoch=None, guarantee=None)
    rows = rows_of(measured(), model)
    assert cells(rows, "Seconds per epoch") == ["10.0", "not known"]
    assert cells(rows, "Guarantee")[1] == "none (measured only)"
    assert "mitigation not known" in Reader(page_of(rows)).visible
    assert list(csv.DictReader(io.StringIO(csv_text(rows))))[1]["mitigation"] == "not known"


@pytest.mark.parametrize("num_others", range(1, 8))
@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_fits_the_terminal_and_names_every_run(num_others, width):
    others = [with_perplexity(f"run-{n}", 150 + n, guarantee=PROVED) for n in range(num_others)]
    text = printed(rows_of(measured(), *others), width)
    assert max(map(len, text.splitlines())) <= width
    for run in others:
        assert len(re.findall(rf"\b{run.name}\b", text)) == 1


def test_four_runs_fit_side_by_side_at_80_columns():
    others = [with_perplexity(name, 151) for name in ("dp", "adversarial", "triplet")]
    rows = rows_of(measured(), *others)
    assert len(terminal_tables(rows, 80)) == 1


def test_a_long_schedule_is_thinned_in_the_table_and_not_in_the_csv():
    one = exposures([1, 2, 3, 4])[0]
    every = [one | {"repetitions": n, "text": f"t{n}"} for n in (*range(1, 11), 20, 30, 40, 50)]
    rows = rows_of(measured(exposures=every), with_perplexity("b", 150))
    chosen = chosen_repetitions(rows)
    assert len(chosen) == MOST_REPETITIONS
    assert (chosen[0], chosen[-1]) == (1, 50)
    assert "exposure_bits_at_7" in csv_text(rows).splitlines()[0].split(",")


def test_every_line_of_the_table_is_explained():
    rows = rows_of(measured(), with_perplexity("b", 150))
    explained = re.findall("<dt>(.*?)</dt>", page_of(rows))
    for line in comparison_table(rows).rows:
        assert line.name == "Model" or any(line.name.startswith(name) for name in explained), line


def test_the_csv_says_0_for_nothing_found_and_nothing_for_not_known():
    leakage = {"leaks": 0, "people_affected": 0, "unique": 0, "leakage_epsilon": None}
    rows = rows_of(measured(groups=None), with_perplexity('b,"c"', 150, leakage=leakage))
    first, second = csv.DictReader(io.StringIO(csv_text(rows)))
    assert second["name"] == 'b,"c"'
    assert (first["leaks"], first["people_affected"], first["unique"]) == ("9", "3", "25")
    assert (second["leaks"], second["unique"], second["leakage_epsilon"]) == ("0", "0", "")
    assert (first["gap_perplexity"], second["gap_perplexity"]) == ("", "3.0")
    assert float(second["exposure_bits_at_10"]) == 12.5
    assert (first["tab_planted_successes"], first["tab_planted_ceiling"]) == ("2", "3")
    assert float(first["membership_documents_loss_auc"]) == 0.8
    assert (first["epsilon"], first["standing"]) == ("", "measured only")


def test_the_csv_tells_why_a_promise_is_not_proved_and_of_an_insecure_seed():
    published = PROVED | {"standing": "as published", "because": "The vocabulary is not private."}
    rows = rows_of(
        measured(),
        with_perplexity("a", 151, guarantee=published),
        with_perplexity("b", 151, guarantee=PROVED | {"insecure_seed": True}),
        with_perplexity("c", 151, guarantee=None),
    )
    lines = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [line["because"] for line in lines] == [
        "Nothing was proved.", "The vocabulary is not private.", "", "",
    ]  # fmt: skip
    assert [line["insecure_seed"] for line in lines] == ["", "False", "True", ""]


# The page


def test_nothing_that_is_written_holds_text_or_names():
    rows = rows_of(measured(), with_perplexity("b", 150))
    for text in (
        json.dumps(rows),
        csv_text(rows),
        printed(rows),
        page_of(rows, MATCHING),
    ):
        for secret in [*SECRETS, *OWNERS, REAL]:
            assert secret not in text


def test_the_page_stands_alone_and_runs_nothing():
    page = page_of(rows_of(measured(), with_perplexity("b", 150)), MATCHING)
    elements = Reader(page).elements
    assert not {tag for tag, _ in elements} & {"script", "img", "iframe", "object", "form"}
    assert not [kinds for _, kinds in elements if "style" in kinds]
    links = [kinds.get("href") or kinds.get("src") for _, kinds in elements]
    assert {link for link in links if link} == {"#table", "data:,"}
    (policy,) = [kinds["content"] for _, kinds in elements if kinds.get("http-equiv")]
    assert "script-src 'none'" in policy


def test_names_and_notes_are_text_and_no_markup():
    rows = rows_of(measured("<b>plain</b>"), with_perplexity("<i>x</i>", 150))
    page = page_of(rows, MATCHING, notes=["110 users are <too> few."])
    assert "<b>plain</b>" not in page
    assert "<i>x</i>" not in page
    assert "110 users are <too> few." in Reader(page).visible


def test_every_verdict_and_every_reason_is_on_the_page():
    runs = [
        measured(not_known={"leakage ε_l": "No reference model was given (--reference DIR)."}),
        with_perplexity("b", 700),
        with_perplexity("c", 150, train_text="other", not_known={"exposure": "No key."}),
    ]
    rows = rows_of(*runs)
    visible = Reader(page_of(rows, MATCHING)).visible
    for sentence in [*(v for row in rows for v in row["verdicts"]), *missing(rows)]:
        assert sentence in visible
    assert headline(rows)[0] in visible


def test_a_comparison_without_a_figure_to_draw_has_a_page_all_the_same():
    bare = {"groups": None, "leakage": None, "exposures": None, "membership": None}
    rows = rows_of(measured(**bare), with_perplexity("b", 1, **bare))
    page = page_of(rows, MATCHING)
    assert "<svg" not in page
    assert "cannot be compared" in Reader(page).visible
