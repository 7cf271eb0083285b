"""The page of attacks on vectors, from made-up figures: what it says, and in a browser."""

import io
import re

import pytest
from rich.console import Console

from report.samples import attacked_runs as runs
from report.vectors.results import attribute, entities, fairness, figure, result, signed
from tightlip.report.kit import render_page, write_page
from tightlip.report.vectors import curves, legend
from tightlip.report.vectors.words import (
    attack_table,
    columns_of,
    findings,
    headline,
    names_read,
    terminal_tables,
)


def page_of(results, **others):
    return render_page("vectors", results=results, **others)


def cell(results, section, name, place=0):
    lines = attack_table(columns_of(results)).rows
    (line,) = [one for one in lines if one.section.startswith(section) and one.name == name]
    return line.cells[place]


# What it says


def test_a_leak_is_called_so_only_beyond_its_interval():
    assert headline([result("r", leak=0.1)]) == (
        "From one vector, an attacker reads gender better than by guessing."
    )
    assert headline([result("r", leak=0.02)]).startswith("From one vector, no attacker here")
    assert headline(runs()[:4]).startswith("In 4 of 4 runs")  # names are read in all of them
    quiet = [result("a", leak=0.0), result("b", leak=0.0)]
    assert headline(quiet).startswith("In none of 2 runs")


def test_names_count_as_read_below_the_better_of_both_guesses():
    run = result("r", entities=entities())
    assert names_read(run)
    run["entities"]["everywhere"]["all"] = figure(0.52)
    assert not names_read(run)


def test_findings_weigh_what_they_say():
    words = " ".join(findings(result("r", leak=0.02)))
    assert "62.0% right by logistic regression, 60.0% by guessing" in words
    assert "ranks people rightly" in words
    assert "Without the noise, gender and age could be read." in words
    assert "Averaging 16 releases" in words
    assert "together these releases cost ε 20.00" in words
    assert "not equally right for all groups of age" in words
    assert "all groups of gender" not in words


def test_the_cost_of_averaging_stands_beside_what_it_finds():
    cost = cell([result("r")], "Empirical", "what these averages cost")
    assert (cost.value, cost.under) == ("ε 20.00", "16 releases, δ 1e-05; any two texts")
    page = page_of([result("r")])
    assert page.count("ε 20.00") >= 2


def test_epsilon_stands_with_delta_and_standing_and_the_published_one_apart():
    guarantee = cell([result("r")], "What is released", "Guarantee of a vector")
    assert (guarantee.value, guarantee.under) == ("ε 4.00", "δ 1e-05, proved; any two texts")
    published = [result("p", mechanism="laplace-as-published", epsilon=6.34)]
    coordinate = cell(published, "What is released", "ε of one coordinate")
    assert (coordinate.value, coordinate.under) == ("0.050", "as published; any two texts")
    bare = cell([result("b", method="none")], "What is released", "Guarantee of a vector")
    assert (bare.value, bare.under) == ("none", "measured only")


def test_with_masked_words_each_line_says_for_which_texts_and_what_holds_for_any_two():
    run = result("m", mechanism="laplace-as-published", epsilon=8.0, dropout=0.5)
    run["guarantee"] |= {
        "dropout": 0.5,
        "adjacency": "two texts that differ in one word",
        "any_two_texts": {"per_coordinate": 0.0983, "epsilon": 8.961},
    }
    run["releases"]["how"] = "each amplified by its masks, at δ/16, and added"
    guarantee = cell([run], "What is released", "Guarantee of a vector")
    assert guarantee.under == "δ 1e-05, proved; one word differs (any two texts: 8.97)"
    coordinate = cell([run], "What is released", "ε of one coordinate")
    assert coordinate.under == "as published; one word differs (any two texts: 0.099)"
    cost = cell([run], "Empirical", "what these averages cost")
    assert cost.under == "16 releases, δ 1e-05; one word differs", "as an earlier version kept it"
    run["releases"]["any_two_texts"] = 59.452
    cost = cell([run], "Empirical", "what these averages cost")
    assert cost.under == "16 releases, δ 1e-05; one word differs (any two texts: 59.46)"
    page = page_of([run])
    assert page.count("one word differs (any two texts: 8.97)") == 2
    run["releases"]["how"] = "the noise of all composed, for any two texts"
    assert cell([run], "Empirical", "what these averages cost").under.endswith("; any two texts")


def test_the_gap_between_best_and_worst_of_several_groups_says_why_it_has_no_interval():
    run = result("r")
    run["fairness"]["gender"] = fairness(values=("a", "b", "c"))
    run["attributes"]["gender"]["values"] = ["a", "b", "c"]
    assert cell([run], "Fairness", "gap by gender, points").under == (
        "no interval, best and worst of 3"
    )
    assert "no interval, since best and worst of several groups" in page_of([run])
    assert cell([run], "Fairness", "gap by age, points").under == "7.0 to 13.0"


def test_figures_without_rows_of_the_training_part_stand_beside():
    both = [result("r", views=("all", "unseen"), notes=["9 of 700 test texts also stand"])]
    assert cell(both, "Empirical", "strongest, rows not in train").value != "–"
    assert "9 of 700 test texts also stand" in page_of(both)
    names = [line.name for line in attack_table(columns_of([result("r")])).rows]
    assert not any("not in train" in name for name in names)


def test_seeds_become_a_mean_with_its_spread():
    seeds = [result(f"s/seed-{n}", group="s", main={"all": figure(v)}) for n, v in enumerate((0.7, 0.8))]  # fmt: skip
    (column,) = columns_of(seeds)
    main = cell(seeds, "Main task", "Accuracy")
    assert (main.value, main.under) == ("75.0%", "± 7.1 over seeds")
    assert column.name == "s"
    for run, area in zip(seeds, (0.6, 0.7), strict=True):
        run["attributes"]["gender"]["attackers"]["strongest"]["all"]["auc"] = figure(area)
    areas = cell(seeds, "Attackers on gender", "AUC of the strongest")
    assert (areas.value, areas.under) == ("0.65", "± 0.07 over seeds")


def test_what_is_not_known_is_a_dash_and_breaks_nothing():
    run = result("r", picture=None, releases=None)
    nothing = {"value": None, "low": None, "high": None}
    found = run["attributes"]["gender"]["attackers"]["strongest"]["all"]
    found["auc"] = nothing
    found["above_majority"] = signed(0.1) | {"low": None, "high": None}
    run["fairness"]["gender"] = {**fairness(), "gap": None, "p": None, "test": "one group only"}
    beside = [run, result("other")]
    assert cell(beside, "Attackers on gender", "AUC of the strongest").value == "–"
    assert cell(beside, "Attackers on gender", "AUC of the strongest", 1).value == "0.73"
    assert "One group only" in page_of([run])


def test_nobody_is_named():
    people = attribute({"strongest": 0.6, "logistic": 0.6, "bare": 0.9}, 0.1, ("Hamlet", "Ophelia"), names_people=True)  # fmt: skip
    run = result("r", attributes={"user": people}, fairness={"user": fairness(values=("Hamlet", "Ophelia"))}, entities=entities(), picture=None)  # fmt: skip
    page = page_of([run])
    for name in ("Hamlet", "Ophelia", "Ann Private", "Bob Secret"):
        assert name not in page
    assert "person 1" in page
    assert "name 2" in page


def test_the_page_is_alone_and_escapes_what_it_is_given():
    page = page_of([result("</style><script>x</script>"), *runs()], version="0.1.0")
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)=["'](?!data:,|#)""", page)
    assert "http" not in page.replace("http-equiv", "")
    assert 'style="' not in page


def test_curves_need_two_points_and_are_drawn_for_each_way_of_adding_noise():
    assert curves(columns_of(runs()[:2])) == []
    drawn = curves(columns_of(runs()))
    assert [(title, what) for title, what, _ in drawn] == [
        ("Over ε", "gaussian, no word masked"),
        ("Over μ", "gaussian at ε 4 of the vector"),
    ]
    assert "at-40 (gaussian, ε 40), main-task accuracy: " in drawn[0][2]


def test_many_values_share_the_last_colour():
    many = attribute({"strongest": 0.5}, 0.1, tuple("abcdefghi"))
    assert legend(many)[-1] == (5, "4 others")
    assert legend(attribute({"strongest": 0.5}, 0.1, tuple("abcdef")))[-1] == (5, "f")
    assert len(legend(attribute({"strongest": 0.5}, 0.1))) == 2


def test_the_terminal_has_the_same_lines():
    console = Console(file=io.StringIO(), width=100)
    for table in terminal_tables(columns_of(runs()), 100):
        console.print(table)
    text = console.file.getvalue()
    assert "Empirical privacy, 1 − X" in text
    assert "strongest on one vector" in text


# In a browser, beyond what holds for every page


@pytest.fixture(scope="module", params=["one", "several"])
def path(request, tmp_path_factory):
    given = runs() if request.param == "several" else runs()[2:3]
    path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    return write_page("vectors", path, results=given, version="0.1.0")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_screen(opened, path, width):
    page = opened(path, width=width)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_needs_no_script_and_marks_have_values_to_hover(opened, path):
    page = opened(path, java_script_enabled=False)
    assert page.locator("h1").count() == 1
    assert page.locator("#table tbody tr").count() > 20
    assert page.locator("svg circle > title, svg g > title").count() > 10


def test_run_names_in_the_plot_do_not_cover_each_other(opened, path):
    page = opened(path)
    boxes = page.evaluate("""() => [...document.querySelectorAll('.run-name')]
        .map(n => n.getBoundingClientRect()).map(r => [r.left, r.right, r.top, r.bottom])""")
    for place, one in enumerate(boxes):
        for other in boxes[place + 1 :]:
            across = one[0] < other[1] and other[0] < one[1]
            assert not (across and one[2] + 3 < other[3] and other[2] + 3 < one[3])
