"""Rows, verdicts, table and CSV of a comparison, from figures known beforehand."""

import csv
import io
import json
import random
import re

import pytest
from rich.console import Console
from scipy import stats

from report.runs import (
    NO_PROMISE,
    OWNERS,
    PROVED,
    REAL,
    SECRETS,
    exposures,
    measured,
    membership,
    with_perplexity,
)
from report.test_page import Reader
from tightlip.core.errors import UsageError
from tightlip.report.comparison import Matching, compared, exposure_change
from tightlip.report.comparison_page import render_comparison
from tightlip.report.comparison_table import (
    MOST_REPETITIONS,
    chosen_repetitions,
    csv_text,
    table_lines,
    terminal_tables,
)
from tightlip.report.comparison_words import MEANINGS, headline, missing

MATCHING = Matching()


def rows_of(*runs, matching=MATCHING):
    return compared(runs, matching)


def cells(rows, name):
    (line,) = [line for line in table_lines(rows) if line.name == name]
    return [cell.value for cell in line.cells]


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


def test_tab_counts_planted_and_real_canaries_apart_and_says_how_many_can_succeed():
    (row, _) = rows_of(measured(), with_perplexity("triplet", 151))
    assert row["tab"] == {
        "planted": {"successes": 2, "num_canaries": 4, "ceiling": 3},
        "real": {"successes": 0, "num_canaries": 1, "ceiling": 1},
    }


@pytest.mark.parametrize("seed", range(10))
def test_the_change_in_exposure_is_a_paired_t_interval(seed):
    draw = random.Random(seed)
    before, after = ([draw.uniform(0, 13) for _ in range(4)] for _ in range(2))
    base = measured(exposures=exposures(before))
    change = exposure_change(with_perplexity("b", 150, exposures=exposures(after)), base)
    oracle = stats.ttest_rel([after[1], after[3]], [before[1], before[3]]).confidence_interval(0.95)
    assert (change["low"], change["high"]) == pytest.approx(tuple(oracle))
    assert change["repetitions"] == 10


def test_what_is_not_known_is_none_and_never_0():
    reason = "The run holds out no text."
    bare = measured(
        "bare", held_out_text=None, groups=None, membership=None, exposures=None, leakage=None,
        seconds_per_epoch=None, exposed_above_bits=None, not_known={"perplexity": reason},
    )  # fmt: skip
    rows = rows_of(measured(), bare)
    row = rows[1]
    for name in ("perplexity", "unique", "leakage_epsilon", "gap", "membership", "comparable"):
        assert row[name] is None, name
    assert row["exposure"] == []
    assert row["seconds_per_epoch"] is None
    assert row["verdicts"] == [f"How useful it is is not known. {reason}"]
    for line in table_lines(rows):
        if line.name not in ("Model", "Guarantee"):
            assert line.cells[1].value == "not known", line.name


def test_a_perplexity_without_an_interval_comes_from_the_leakage_report():
    (row, _) = rows_of(measured(groups=None), with_perplexity("b", 150))
    assert row["perplexity"] == {"value": 150.0, "low": None, "high": None}


def test_seconds_are_held_against_the_baseline():
    rows = rows_of(measured(), with_perplexity("slow", 150, seconds_per_epoch=25.0))
    assert [row["times_baseline"] for row in rows] == [1.0, 2.5]


def test_the_reference_score_is_shown_only_where_every_run_has_it():
    both = [measured(membership=membership(0.8, reference=0.9))]
    rows = rows_of(*both, with_perplexity("b", 150, membership=membership(0.6, reference=0.7)))
    assert cells(rows, "Membership AUC") == ["0.90", "0.70"]
    rows = rows_of(*both, with_perplexity("b", 150, membership=membership(0.6)))
    assert cells(rows, "Membership AUC") == ["0.80", "0.60"]


# The standing


def test_epsilon_is_there_only_beside_its_standing():
    liar = NO_PROMISE | {"epsilon": 2.71828, "delta": 1e-5}
    rows = rows_of(measured(guarantee=liar), with_perplexity("dp", 151, guarantee=PROVED))
    assert [row["guarantee"]["epsilon"] for row in rows] == [None, 3.14159]
    page = render_comparison(rows, MATCHING)
    assert cells(rows, "Guarantee") == [
        "none (measured only)",
        "ε = 3.15 at δ = 1e-05, per user (proved)",
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
    assert "this ε protects nobody" in render_comparison(rows, MATCHING)


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
    page = render_comparison(rows, MATCHING)
    assert "1 run without a perplexity on the baseline&#39;s held-out text cannot be drawn" in page


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
    assert "its lowest is 718" in Reader(render_comparison(rows, matching)).visible


def test_snapshots_too_far_apart_are_told_to_be_made_more_often():
    row = rows_of(measured(), with_perplexity("b", 90), matching=Matching(at_perplexity=160))[1]
    assert "--snapshot-steps" in row["verdicts"][0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"tolerance": 5}, "tolerance=5 is no share"), ({"at_perplexity": 0.5}, "out of reach")],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Matching(**settings)


# The one sentence


def test_the_quietest_of_the_matched_runs_is_named():
    loud = with_perplexity("b", 150, exposures=exposures([1, 11, 2, 12.1]))
    quiet = with_perplexity("c", 152, exposures=exposures([1, 4, 2, 5]))
    untrained = with_perplexity("d", 700, exposures=exposures([1, 0, 2, 0]))
    sentence, more = headline(rows_of(measured(), loud, quiet, untrained))
    assert sentence == "At matched utility, c gives away least."
    assert "4.50 bits in c, 12.5 bits in plain" in more
    assert "Not comparable: d." in more


def test_a_difference_that_may_be_luck_is_no_difference():
    lucky = with_perplexity("b", 150, exposures=exposures([1, 2, 2, 12.9]))
    sentence, more = headline(rows_of(measured(), lucky))
    assert sentence == "At matched utility, no run clearly gives away less than plain."
    assert "2 canaries cannot tell that from chance" in more


def test_a_louder_run_is_no_gain():
    louder = with_perplexity("b", 150, exposures=exposures([1, 13, 2, 13]))
    assert headline(rows_of(measured(), louder))[0] == (
        "At matched utility, no run gives away less than plain."
    )


def test_without_a_match_nobody_wins():
    sentence, more = headline(rows_of(measured(), with_perplexity("dp", 700)))
    assert sentence.startswith("No run is comparable to plain at matched utility")
    assert "from 150 to 700" in more


def test_without_canaries_unique_sequences_decide():
    leakage = {"unique": 3, "users_with_unique": 1, "num_users": 12, "leakage_epsilon": None}
    rows = rows_of(
        measured(exposures=None), with_perplexity("b", 150, exposures=None, leakage=leakage)
    )
    sentence, more = headline(rows)
    assert sentence == "At matched utility, b gives away least."
    assert "3 unique sequences in b, 25 unique sequences in plain" in more


def test_bits_are_never_held_against_counts():
    """Two unique sequences are no less than 12.5 bits."""
    leakage = {"unique": 2, "users_with_unique": 1, "num_users": 12, "leakage_epsilon": None}
    unmeasured = with_perplexity("b", 150, exposures=None, leakage=leakage)
    assert "give away is not known" in headline(rows_of(measured(), unmeasured))[0]
    sentence, more = headline(rows_of(measured(exposures=None), with_perplexity("b", 150)))
    assert sentence == "At matched utility, no run gives away less than plain."
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


# The table


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
    explained = [name for name, _ in MEANINGS]
    for line in table_lines(rows_of(measured(), with_perplexity("b", 150))):
        assert line.name == "Model" or any(line.name.startswith(name) for name in explained), line


def test_the_csv_says_0_for_nothing_found_and_nothing_for_not_known():
    leakage = {"unique": 0, "users_with_unique": 0, "num_users": 12, "leakage_epsilon": None}
    rows = rows_of(measured(groups=None), with_perplexity('b,"c"', 150, leakage=leakage))
    first, second = csv.DictReader(io.StringIO(csv_text(rows)))
    assert second["name"] == 'b,"c"'
    assert (second["unique"], second["leakage_epsilon"]) == ("0", "")
    assert (first["gap_perplexity"], second["gap_perplexity"]) == ("", "3.0")
    assert float(second["exposure_bits_at_10"]) == 12.5
    assert (first["tab_planted_successes"], first["tab_planted_ceiling"]) == ("2", "3")
    assert float(first["membership_documents_loss_auc"]) == 0.8
    assert (first["epsilon"], first["standing"]) == ("", "measured only")


# The page


def test_nothing_that_is_written_holds_text_or_names():
    rows = rows_of(measured(), with_perplexity("b", 150))
    for text in (
        json.dumps(rows),
        csv_text(rows),
        printed(rows),
        render_comparison(rows, MATCHING),
    ):
        for secret in [*SECRETS, *OWNERS, REAL]:
            assert secret not in text


def test_the_page_stands_alone_and_runs_nothing():
    page = render_comparison(rows_of(measured(), with_perplexity("b", 150)), MATCHING)
    elements = Reader(page).elements
    assert not {tag for tag, _ in elements} & {"script", "img", "iframe", "object", "form"}
    assert not [kinds for _, kinds in elements if "style" in kinds]
    links = [kinds.get("href") or kinds.get("src") for _, kinds in elements]
    assert {link for link in links if link} == {"#table", "data:,"}
    (policy,) = [kinds["content"] for _, kinds in elements if kinds.get("http-equiv")]
    assert "script-src 'none'" in policy


def test_names_and_notes_are_text_and_no_markup():
    rows = rows_of(measured("<b>plain</b>"), with_perplexity("<i>x</i>", 150))
    page = render_comparison(rows, MATCHING, notes=["110 users are <too> few."])
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
    visible = Reader(render_comparison(rows, MATCHING)).visible
    for sentence in [*(v for row in rows for v in row["verdicts"]), *missing(rows)]:
        assert sentence in visible
    assert headline(rows)[0] in visible


def test_a_comparison_without_a_figure_to_draw_has_a_page_all_the_same():
    bare = {"groups": None, "leakage": None, "exposures": None, "membership": None}
    rows = rows_of(measured(**bare), with_perplexity("b", 1, **bare))
    page = render_comparison(rows, MATCHING)
    assert "<svg" not in page
    assert "cannot be compared" in Reader(page).visible
