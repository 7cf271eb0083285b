"""The DPNR paper's experiment: its corpora, its tables, and the whole of it on a few made-up lines."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import f1_score

from tightlip.core.errors import UsageError
from tightlip.core.figures import rounded_up
from tightlip.experiments import vectors as experiment
from tightlip.experiments.vectors import (
    SCALES,
    TablesScale,
    ag_task,
    blog_task,
    plays_task,
    reproduce_representation,
    task_of,
)
from tightlip.experiments.vectors_page import (
    GROUPS,
    MAIN_AND_PRIVACY,
    certainty,
    csv_text,
    headline,
    tables,
)
from tightlip.report.kit import render_page
from tightlip.vectors import attack, attack_figures, attackers

pytestmark = pytest.mark.slow

COLOURS = ["amber", "azure", "ivory", "olive", "coral", "khaki", "mauve", "ochre"]
BEASTS = ["otter", "heron", "badger", "lynx", "stoat", "ibex", "marten", "crane"]
SIGN = {"0": "harbour", "1": "orchard"}
BETWEEN = "=" * 20


def ag_line(draw: random.Random) -> str:
    """A line whose label one word tells, and whose entities are words of their own."""
    label = draw.choice("01")
    entities = sorted(draw.sample(range(5), draw.randint(1, 2)))
    words = [*draw.choices(COLOURS + BEASTS, k=8), *[SIGN[label]] * 2]
    words += [f"Person{entity}" for entity in entities]
    draw.shuffle(words)
    return f"{label}\t{' '.join(words)}\t{' '.join(map(str, entities))}"


@pytest.fixture(scope="module")
def ag_file(tmp_path_factory):
    draw = random.Random(0)
    parts = [[ag_line(draw) for _ in range(size)] for size in (160, 40, 40)]
    parts[2][0] = parts[0][0]  # as in theirs, some of test stands in train
    path = tmp_path_factory.mktemp("ag") / "ag_data.txt"
    path.write_text(
        "\n".join(f"\n{BETWEEN}\n".join("\n".join(p) for p in parts).split("\n")) + "\n"
    )
    return path


def test_the_papers_ag_file_keeps_its_parts_and_its_entities(ag_file, tmp_path):
    task = ag_task(ag_file, tmp_path)
    table = pq.read_table(task.path).to_pylist()
    assert [row["split"] for row in table].count("train") == 160
    assert [row["split"] for row in table].count("test") == 40
    for row in table:
        named = {f"entity_{n + 1}" for n in range(5) if f"Person{n}" in row["text"].split()}
        assert {name for name in task.private if row[name] == "present"} == named
    assert "0 of dev and 1 of test also stand in train" in task.about
    assert task_of(ag_file, tmp_path) == task


@pytest.mark.parametrize(
    "line", ["one cell", "0\ttext", "0\ttext\t7", "0\ttext\tx", "0\ttext\t1\tmore"]
)
def test_a_line_that_is_no_ag_line_is_named_with_its_number(ag_file, tmp_path, line):
    path = tmp_path / "other.txt"
    path.write_text(ag_file.read_text().replace("\n", f"\n{line}\n", 1))
    with pytest.raises(UsageError, match=r"Line 2 of .*other\.txt"):
        ag_task(path, tmp_path)


def test_a_file_without_three_parts_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("0\ta text\t1\n")
    with pytest.raises(UsageError, match="three parts"):
        ag_task(path, tmp_path)


def test_blogs_keep_posts_of_one_topic_by_the_young_and_the_old(tmp_path):
    draw = random.Random(1)
    worlds = [[f"{letter}{n}word" for n in range(30)] for letter in "abcdefghij"]
    rows = []
    for number in range(600):
        world = worlds[number % 10]
        rows.append(
            {
                "user": number // 3,
                "gender": draw.choice(["female", "male"]),
                "age": draw.choice([16, 19, 20, 25, 29, 30, 44]),
                "text": " ".join(draw.choices(world, k=40)),
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "blogs.parquet")
    task = blog_task(tmp_path / "blogs.parquet", tmp_path / "made")
    kept = pq.read_table(task.path).to_pylist()
    ages = {row["text"]: row["age"] for row in rows}
    assert len(kept) > 200, "posts of ten clear worlds have a topic each"
    for row in kept:
        assert row["age"] == ("under 20" if ages[row["text"]] < 20 else "30 and over")
        assert not 20 <= ages[row["text"]] < 30
    assert task.split == "user"
    # A topic that LDA found is one world's, or a few worlds' together; a world has one topic.
    found = {
        world: {r["topic"] for r in kept if r["text"].startswith(world)} for world in "abcdefghij"
    }
    assert sum(len(topics) == 1 for topics in found.values()) >= 8


def test_blogs_without_anything_to_hide_are_refused(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "mood": ["b"]}), tmp_path / "moods.parquet")
    with pytest.raises(UsageError, match="age or gender to hide"):
        task_of(tmp_path / "moods.parquet", tmp_path)


def test_the_bundled_plays_are_a_task_of_their_own(tmp_path):
    task = task_of(None, tmp_path)
    assert task == plays_task(tmp_path)
    assert {task.label, *task.private} <= set(pq.read_schema(task.path).names)


def test_f1_over_all_entities_is_the_micro_average_of_another_library():
    rng = np.random.default_rng(0)
    truth, guess = rng.random((2, 50, 4)) < 0.3
    found = [
        {
            "present": {
                "num": int(truth[:, n].sum()),
                "said": int(guess[:, n].sum()),
                "right": int((truth[:, n] & guess[:, n]).sum()),
            }
        }
        for n in range(4)
    ]
    assert experiment._f1(found) == pytest.approx(f1_score(truth, guess, average="micro"))
    nothing = [{"present": {"num": 3, "said": 0, "right": 0}}]
    assert experiment._f1(nothing) == 0.0


def test_the_papers_differences_were_added_up_rightly():
    # As printed in its Table 4: ADV and DPNR relative to NON-PRIV.
    printed = {"AG": ((-21.71, 26.43), (2.12, 31.13)), "BLOG": ((-2.44, 1.16), (-0.38, 15.86))}
    for corpus, (adversarial, dpnr) in printed.items():
        main, privacy = MAIN_AND_PRIVACY[corpus]["none"]
        for way, (more_main, more_privacy) in (("adversarial", adversarial), ("dpnr", dpnr)):
            both = (main + more_main, privacy + more_privacy)
            assert MAIN_AND_PRIVACY[corpus][way] == pytest.approx(both, abs=0.005)
    assert all(len(figures) == 4 for figures in GROUPS.values())


TINY = TablesScale(
    name="tiny",
    num_seeds=2,
    epsilons=(0.5, 1.0),
    dropouts=(0.3,),
    calibrated=(8.0,),
    attackers=("mlp", "logistic"),
    training={"epochs": 1, "dimensions": 8},
)


@pytest.fixture(scope="module")
def reproduced(ag_file, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "tiny", TINY)
        # 70 attacks whose strength is not asked here.
        patch.setattr(attackers, "HIDDEN", 16)
        patch.setattr(attackers, "LEARNING_RATES", (1e-3,))
        patch.setattr(attackers, "MOST_EPOCHS", 4)
        patch.setattr(attackers, "PENALTIES", (1e-3, 1.0))
        patch.setattr(attack_figures, "NUM_SWAPS", 99)
        patch.setattr(attack, "MOST_POINTS", 40)
        out = tmp_path_factory.mktemp("reproduced") / "out"
        yield reproduce_representation([ag_file], scale="tiny", out=out, device="cpu")


def test_every_way_is_trained_and_every_table_filled(reproduced):
    (section,) = reproduced.result["corpora"]
    ways = [row["way"] for row in section["rows"]]
    assert ways == ["none", "adversarial", *["dpnr"] * 3, "laplace", "gaussian"]
    made = tables(section)
    assert [table.number for table in made] == ["2", "3", "4", "5", "7"]
    for table in made:
        assert all(1 + len(row.cells) == len(table.columns) for row in table.rows)
    values = [[cell.value for cell in row.cells] for row in made[0].rows]
    (bare,) = [row for row in values if row[0] == "–"]
    assert bare[2] == "78.75", "theirs stands beside ours"
    assert bare[3:] == ["none", "–"]
    assert len(csv_text([section]).splitlines()) == 1 + sum(
        len(t.rows) * (len(t.columns) - 1) for t in made
    )


def test_what_the_noise_promises_stands_with_each_way(reproduced):
    (section,) = reproduced.result["corpora"]
    for row in section["rows"]:
        epsilon = row["guarantee"]["epsilon"]
        if row["way"] in ("none", "adversarial"):
            assert epsilon is None
        elif row["way"] == "dpnr" and not row["dropout"]:
            assert row["epsilon"] < epsilon <= 8 * row["epsilon"] * (1 + 1e-6), "eight coordinates"
        elif row["way"] != "dpnr":
            assert epsilon <= 8


def test_every_whole_vectors_epsilon_says_for_which_texts_it_holds(reproduced):
    (section,) = reproduced.result["corpora"]
    two, three = tables(section)[:2]
    assert [row.cells[-1].value for row in two.rows[1:]] == ["any two texts"] * 2
    plain, masked = (
        next(r for r in section["rows"] if r["epsilon"] == 1 and r["dropout"] == share)
        for share in (0.0, 0.3)
    )
    other = rounded_up(plain["guarantee"]["epsilon"])
    assert three.rows[-1].cells[-1].value == f"one word differs (any two texts: {other})"
    assert masked["guarantee"]["epsilon"] < plain["guarantee"]["epsilon"]
    for name in ("representation.html", "representation.csv"):
        assert (
            f"one word differs (any two texts: {other})" in (reproduced.folder / name).read_text()
        )
    assert f"any_two_texts: ε {other}" in (reproduced.folder / "representation.html").read_text()


def test_the_strongest_is_the_one_that_the_development_part_chose(reproduced):
    """Its figures are those of the kept attacks, not the least over the attackers."""
    (section,) = reproduced.result["corpora"]
    for row in section["rows"]:
        left, chosen = [], []
        for seed in ("seed-0", "seed-1"):
            kept = json.loads(
                (
                    reproduced.folder / section["name"] / row["run"] / seed / "attack.json"
                ).read_text()
            )["runs"][0]["attributes"]
            counts = [
                one["attackers"][one["strongest"]]["all"]["by_value"]["present"]
                for one in kept.values()
            ]
            total = sum(one["num"] + one["said"] for one in counts)
            left.append(1 - (2 * sum(one["right"] for one in counts) / total if total else 0.0))
            chosen += [one["strongest"] for one in kept.values()]
        assert row["privacy"]["strongest"]["mean"] == pytest.approx(np.mean(left))
        assert row["strongest"] == {name: chosen.count(name) for name in set(chosen)}


def test_one_seed_is_called_so_in_the_headline_and_under_it(reproduced):
    assert "means over 2 seeds" in headline(reproduced.result)
    assert "Ours are means over 2 seeds" in certainty(reproduced.result)
    one = reproduced.result | {"num_seeds": 1}
    assert headline(one).endswith("; one seed).")
    assert "of one seed and has no interval" in certainty(one)
    assert "of one seed and has no interval" in render_page("vectors-paper", result=one)


def test_the_page_and_the_tables_hold_no_text_and_nobodys_name(reproduced):
    for name in ("representation.html", "representation.csv", "representation.json"):
        written = (reproduced.folder / name).read_text()
        assert "Person" not in written
        assert not any(word in written for word in COLOURS + BEASTS)
        assert "http" not in written.replace("http-equiv", "")


def test_given_again_it_trains_and_attacks_nothing_anew(reproduced, ag_file):
    files = [
        *reproduced.folder.rglob("metrics.json"),
        *reproduced.folder.rglob("seed-*/attack.json"),
    ]
    assert len(files) == 2 * 7 * 2
    before = {path: path.stat().st_mtime_ns for path in files}
    again = reproduce_representation([ag_file], scale="tiny", out=reproduced.folder, device="cpu")
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert json.dumps(again.result) == json.dumps(reproduced.result)


def test_another_experiment_in_the_same_folder_is_refused(reproduced, ag_file):
    with pytest.raises(UsageError, match="another extractor"):
        reproduce_representation(
            [ag_file], scale="tiny", out=reproduced.folder, extractor="lstm", device="cpu"
        )


def test_a_scale_nobody_knows_and_a_file_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(UsageError, match="smoke"):
        reproduce_representation(scale="smok", out=tmp_path / "out")
    with pytest.raises(UsageError, match="not a file"):
        reproduce_representation([tmp_path / "absent.txt"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
