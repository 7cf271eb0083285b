"""Membership, groups, comparison and gates of models that tightlip did not train."""

import json
import random
from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import tightlip
from animals import WORDS
from by_hand import unlisted
from models.tiny_finetunes import shaken, tiny_llama, words_tokenizer
from tightlip.core.errors import UsageError

QUICK = {"device": "cpu", "num_bootstraps": 100}
SPEAKERS = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
DRAW = random.Random(1)


def said(num_users, *, first=0, each=3):
    return [
        {
            "user": f"u{first + user}",
            "text": " ".join(DRAW.sample(WORDS, 6)),
            "team": "red" if user % 2 else "blue",
        }
        for user in range(num_users)
        for _ in range(each)
    ]


MEMBERS, OTHERS = said(12), said(12, first=6)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model that learnt the members a little, its adapter, and both texts."""
    root = tmp_path_factory.mktemp("any-model")
    tokenizer, model = words_tokenizer(), tiny_llama(max_position_embeddings=64)
    tokenizer.chat_template = SPEAKERS
    model.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    ids = torch.tensor([tokenizer(row["text"])["input_ids"] for row in MEMBERS])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    shaken(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))).save_pretrained(
        root / "adapter"
    )
    for name, rows in (("members", MEMBERS), ("others", OTHERS)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def by_hand(folder, rows):
    """Of each row the mean loss in nats, and its tokens, by transformers' own call."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    with torch.no_grad():
        for row in rows:
            ids = tokenizer(row["text"], return_tensors="pt")["input_ids"]
            found.append((float(model(ids, labels=ids).loss), ids.shape[1] - 1))
    return found


def area(members, others):
    """How often a member's score is above another's, a tie counted half."""
    won = [(one > other) + (one == other) / 2 for one, other in product(members, others)]
    return sum(won) / len(won)


def test_membership_is_the_area_over_the_models_own_losses(place):
    found = tightlip.measure_membership(
        place / "model",
        members=place / "members.jsonl",
        non_members=OTHERS,
        reference=place / "base",
        **QUICK,
    )
    sides = [[-loss for loss, _ in by_hand(place / "model", rows)] for rows in (MEMBERS, OTHERS)]
    unaware = [[-loss for loss, _ in by_hand(place / "base", rows)] for rows in (MEMBERS, OTHERS)]
    ratios = [np.subtract(mine, base) for mine, base in zip(sides, unaware, strict=True)]
    scores = found["documents"]["scores"]
    assert scores["loss"]["auc"]["value"] == pytest.approx(area(*sides), abs=2e-3)
    assert scores["reference"]["auc"]["value"] == pytest.approx(area(*ratios), abs=2e-3)
    assert found["documents"]["num_members"] == len(MEMBERS)
    assert found["users"]["num_nonmembers"] == 6  # the other six wrote training text too


def test_of_chats_only_what_was_said_and_trained_on_counts(place):
    """The prompts are the answers' other way round; only answers were trained on."""

    def chats(rows):
        return [
            {
                "user": row["user"],
                "prompt": [{"role": "user", "content": "adder"}],
                "completion": [{"role": "assistant", "content": row["text"]}],
            }
            for row in rows
        ]

    found = tightlip.measure_membership(
        place / "model", members=chats(MEMBERS), non_members=chats(OTHERS), **QUICK
    )
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    sides = []
    for rows in (MEMBERS, OTHERS):
        scores = []
        for row in rows:
            ids = tokenizer(f"<s>adder</s><s>{row['text']}</s>", return_tensors="pt")["input_ids"]
            labels = ids.clone()
            labels[:, :4] = -100
            labels[:, -1] = -100  # the template's
            with torch.no_grad():
                scores.append(-float(model(ids, labels=labels).loss))
        sides.append(scores)
    assert found["documents"]["scores"]["loss"]["auc"]["value"] == pytest.approx(
        area(*sides), abs=2e-3
    )
    assert any("what a chat's template says" in note for note in found["notes"])


def test_sides_that_differ_in_kind_are_refused(place):
    chats = [{"user": "a", "messages": [{"role": "user", "content": "adder bee"}]}]
    with pytest.raises(UsageError, match="in one format"):
        tightlip.measure_membership(place / "model", members=MEMBERS, non_members=chats, **QUICK)


def test_an_adapters_base_is_its_reference_and_a_model_is_not_its_own(place):
    texts = {"members": MEMBERS, "non_members": OTHERS, **QUICK}
    by_word = tightlip.measure_membership(
        place / "adapter", base=place / "model", reference="base", **texts
    )
    by_folder = tightlip.measure_membership(
        place / "adapter", base=place / "model", reference=place / "model", **texts
    )
    assert by_word["documents"] == by_folder["documents"]
    with pytest.raises(UsageError, match="is the model itself"):
        tightlip.measure_membership(place / "model", reference=place / "model", **texts)


def test_groups_have_the_models_own_perplexities(place):
    found = tightlip.measure_groups(
        place / "model", held_out=OTHERS, against=place / "base", **QUICK
    )
    mine, before = by_hand(place / "model", OTHERS), by_hand(place / "base", OTHERS)
    for entry in found["users"]:
        rows = [place for place, row in enumerate(OTHERS) if row["user"] == entry["user"]]
        for losses, name in ((mine, "perplexity"), (before, "baseline_perplexity")):
            nats, tokens = np.array(
                [(losses[n][0] * losses[n][1], losses[n][1]) for n in rows]
            ).sum(0)
            assert entry[name] == pytest.approx(np.exp(nats / tokens), rel=1e-4)
        assert entry["num_samples"] is None
    assert set(found["attributes"]["team"]) == {"red", "blue"}
    assert (found["gap"], found["curve"]) == (None, [])
    assert any("give --members FILE" in note for note in found["notes"])


def test_groups_know_who_has_little_text_where_the_members_are_given(place):
    uneven = [row for place, row in enumerate(MEMBERS) if place % 3 or row["user"] > "u3"]
    found = tightlip.measure_groups(
        place / "model", held_out=MEMBERS, members=uneven, against=place / "base", **QUICK
    )
    count = {row["user"]: sum(one["user"] == row["user"] for one in uneven) for row in MEMBERS}
    assert {one["user"]: one["num_samples"] for one in found["users"]} == count
    assert found["gap"] is not None


def test_models_reports_and_runs_stand_side_by_side(place, tmp_path):
    prepared = tightlip.prepare(
        MEMBERS,
        tmp_path / "corpus",
        tokenizer=place / "base",
        validation=str(place / "others.jsonl"),
    )
    tightlip.train(
        prepared, tmp_path / "run", model=str(place / "base"), steps=2, sequence_length=16
    )
    report = tightlip.audit(
        place / "model", MEMBERS, validation=OTHERS, out=tmp_path / "report", device="cpu"
    )
    made = tightlip.compare(
        [tmp_path / "run", place / "model", tmp_path / "report"], out=tmp_path / "o", **QUICK
    )
    _, model, reported = made.rows
    assert [row["mitigation"] for row in made.rows] == ["none", "not known", "not known"]
    assert model["leaks"] == reported["leaks"] == report.leaks > 0
    assert model["perplexity"]["value"] == pytest.approx(reported["perplexity"]["value"])
    assert all("other text" not in " ".join(row["verdicts"]) for row in made.rows)
    assert model["membership"]["documents"]["scores"]["loss"]["auc"]["value"] > 0.9
    assert reported["membership"] is None
    assert "A report does not tell" in reported["not_known"]["membership AUC"]
    assert (tmp_path / "o/measures").is_dir()


def test_a_comparison_of_models_needs_their_text_and_keeps_what_it_measured(
    place, tmp_path, monkeypatch
):
    with pytest.raises(UsageError, match="Give corpus=FILE"):
        tightlip.compare([place / "model", place / "base"], out=tmp_path / "o")
    given = {"corpus": MEMBERS, "held_out": OTHERS, "out": tmp_path / "o", **QUICK}
    first = tightlip.compare([place / "base", place / "model"], **given)
    monkeypatch.setattr(
        "tightlip.scan.scanner.Scanner.begun", lambda *given: pytest.fail("it is scanned again")
    )
    assert tightlip.compare([place / "base", place / "model"], **given).rows == first.rows


def test_one_gate_for_every_measure(place, tmp_path, command):
    texts = ("--members", place / "members.jsonl", "--non-members", place / "others.jsonl")
    how = ("--device", "cpu", "--num-bootstraps", "100")
    first = command("membership", place / "base", *texts, *how, "--out", tmp_path / "before")
    assert first.status == 0, first.err
    ran = command(
        "membership", place / "model", *texts, *how, "--out", tmp_path / "now",
        "--baseline", tmp_path / "before", "--fail-on", "auc[loss] > baseline",
        "--fail-on", "auc[zlib]>1", "--junit", tmp_path / "gates.xml", "--json",
    )  # fmt: skip
    assert ran.status == 1
    assert "failed on auc[loss] > baseline" in ran.err
    record = json.loads(ran.out)
    assert record == json.loads((tmp_path / "now/membership.json").read_text())
    suite = ElementTree.parse(tmp_path / "gates.xml").getroot().find("testsuite")
    cases = {case.get("name"): case.find("failure") for case in suite.iter("testcase")}
    assert suite.get("tests") == "2"
    assert suite.get("failures") == "1"
    assert cases["auc[loss] > baseline"] is not None
    assert cases["auc[zlib]>1"] is None
    written = (tmp_path / "gates.xml").read_text()
    assert not any(f'"{row["user"]}"' in written or row["text"] in written for row in MEMBERS)


@pytest.mark.parametrize(
    ("line", "figure"),
    [
        (("groups", "model", "--held-out", "others.jsonl"), "perplexity"),
        (("audit", "model", "members.jsonl"), "leaks"),
        (("compare", "base", "model", "--corpus", "members.jsonl"), "people_affected"),
    ],
)
def test_figures_that_are_known_pass_or_fail_and_the_next_run_can_look_back(
    place, tmp_path, command, line, figure
):
    name, *rest = line
    arguments = [place / one if (place / one).exists() else one for one in rest]
    out = ("--device", "cpu", "--out", tmp_path / "out")
    first = command(name, *arguments, *out, "--fail-on", f"{figure}<0")
    assert first.status == 0, first.err
    again = command(
        name, *arguments, "--device", "cpu", "--out", tmp_path / "again",
        "--fail-on", f"{figure} >= baseline", "--baseline", tmp_path / "out",
    )  # fmt: skip
    assert again.status == 1, again.err
    other = command(
        name,
        *arguments,
        *out,
        "--fail-on",
        f"{figure}>baseline",
        "--baseline",
        place / "model/config.json",
    )
    assert other.status == 2
    assert "is not what tightlip" in other.refusal


def test_a_base_that_does_nothing_is_refused(place, tmp_path):
    with pytest.raises(UsageError, match="is not an adapter"):
        tightlip.audit(place / "model", MEMBERS, base=place / "base", out=tmp_path / "r")
    with pytest.raises(UsageError, match="is not an adapter"):
        tightlip.measure_groups(place / "model", held_out=OTHERS, base=place / "base", **QUICK)


def test_text_beyond_what_training_kept_is_not_trained_on(place, tmp_path):
    report = tightlip.audit(place / "model", MEMBERS, max_length=3, out=tmp_path / "cut")
    whole = tightlip.audit(place / "model", MEMBERS, out=tmp_path / "whole")
    assert report.perplexity == pytest.approx(whole.perplexity)
    rows = report.sequences.to_pylist()
    assert {row["role"] for row in rows} == {"text"}
    assert {row["trained_on"] for row in rows} == {True, False}


def test_a_redacted_report_or_one_without_its_texts_is_matched_with_nothing(place, tmp_path):
    given = {"corpus": MEMBERS, "held_out": OTHERS, **QUICK}
    texts = {"validation": OTHERS, "device": "cpu"}
    tightlip.audit(place / "base", MEMBERS, out=tmp_path / "redacted", redact=True, **texts)
    tightlip.audit(place / "base", MEMBERS, out=tmp_path / "old", **texts)
    summary = json.loads((tmp_path / "old/summary.json").read_text())
    del summary["validation_fingerprint"]
    (tmp_path / "old/summary.json").write_text(json.dumps(summary))
    unlisted(tmp_path / "old/summary.json")
    models = [place / "base", tmp_path / "redacted", tmp_path / "old"]
    rows = tightlip.compare(models, out=tmp_path / "o", **given).rows
    assert [row["comparable"] for row in rows] == [True, None, None]
    assert "redacted report does not tell" in rows[1]["verdicts"][0]
    assert "does not tell on which held-out text" in rows[2]["verdicts"][0]


def test_what_was_kept_is_not_taken_for_other_masks_or_another_beginning(place, tmp_path):
    given = {"corpus": MEMBERS, "held_out": OTHERS, "out": tmp_path / "o", **QUICK}
    models = [place / "base", place / "model"]
    found = {
        name: tightlip.compare(models, **given, **how).rows[0]
        for name, how in {
            "plain": {},
            "cut": {"max_length": 3},
            "begun": {"begin": "always"},
            "again": {},
        }.items()
    }
    areas = {
        name: row["membership"]["documents"]["scores"]["loss"]["auc"]["value"]
        for name, row in found.items()
    }
    assert areas["again"] == areas["plain"]
    assert areas["cut"] != areas["plain"]
    assert found["begun"]["perplexity"] != found["plain"]["perplexity"]
    assert not (tmp_path / "o/.work").exists()
