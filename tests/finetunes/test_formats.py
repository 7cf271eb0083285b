"""Every format of rows, each with a model that TRL tuned on it: against brute force."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import tightlip
from finetunes.brute_force import Shown, auc_by_hand, chat_shown, check_report, tabbed, text_shown
from finetunes.making import tuned_by_trl
from finetunes.people import SECRETS, SYSTEM, TOLD, answered, chats, said, texts, tokenizer

pytestmark = pytest.mark.slow


@dataclass
class Rows:
    """Rows as they are audited, what a model is shown of them, and what TRL is given."""

    rows: list
    shown: list
    trained_by: list | None = None  # where TRL knows the format by another name
    roles: dict = field(default_factory=lambda: {"user": "user", "assistant": "assistant"})
    learnt: tuple = ("user", "assistant")  # whose words the model knows by heart


ASSISTANTS = lambda message: message["role"] == "assistant"  # noqa: E731


def texts_only():
    rows = [{"user": one["user"], "text": one["prompt"] + one["completion"]} for one in texts()]
    shown = [Shown(row["user"], [(row["text"], "text", True)], begins=True) for row in rows]
    return Rows(rows, shown, roles={})


def of_strings():
    rows = texts()
    shown = [
        text_shown(row["user"], row["prompt"], row["completion"], trained=(False, True))
        for row in rows
    ]
    roles = {"assistant": "completion"}
    return Rows(rows, shown, roles=roles, learnt=("assistant",))


def messages():
    rows = chats()
    return Rows(rows, [chat_shown(row["user"], row["messages"]) for row in rows])


def parts():
    rows = [
        {
            "user": row["user"],
            "messages": [
                m if m["role"] == "assistant" else m | {"content": in_parts(m["content"])}
                for m in row["messages"]
            ],
        }
        for row in chats()
    ]
    shown = [chat_shown(row["user"], row["messages"]) for row in rows]
    return Rows(rows, shown, trained_by=rendered(shown))


def in_parts(content):
    first, comma, rest = content.partition(", ")
    return [{"type": "text", "text": text} for text in (first + comma, rest) if text]


def tool_calls():
    rows = []
    for name, told in TOLD.items():
        call = {"function": {"name": "note", "arguments": {"what": answered(name, told)}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        question = {"role": "user", "content": said(name, told)}
        rows.append({"user": name, "messages": [question, answer]})
    return Rows(rows, [chat_shown(row["user"], row["messages"]) for row in rows])


def weights():
    rows = [
        {
            "user": row["user"],
            "messages": [m | {"weight": int(ASSISTANTS(m))} for m in row["messages"]],
        }
        for row in chats()
    ]
    shown = [chat_shown(row["user"], row["messages"], trained=ASSISTANTS) for row in chats()]
    return Rows(rows, shown, trained_by=labelled(shown), learnt=("assistant",))


def of_messages():
    rows = [
        {"user": row["user"], "prompt": row["messages"][:2], "completion": row["messages"][2:]}
        for row in chats()
    ]
    shown = [chat_shown(row["user"], row["messages"], trained=ASSISTANTS) for row in chats()]
    return Rows(rows, shown, learnt=("assistant",))


def preference():
    """What was chosen is trained on by TRL as the completion; what was rejected is nobody's secret."""
    rows, shown = [], []
    for row in texts():
        refused = " I will not say."
        rows.append(
            {"user": row["user"], "prompt": row["prompt"], "chosen": row["completion"], "rejected": refused}
        )  # fmt: skip
        shown += [
            text_shown(row["user"], row["prompt"], answer, trained=(False, True))
            for answer in (row["completion"], refused)
        ]
    return Rows(
        rows, shown, trained_by=texts(), roles={"assistant": "completion"}, learnt=("assistant",)
    )


def sharegpt():
    rows = [
        {
            "user": name,
            "conversations": [
                {"from": "system", "value": SYSTEM},
                {"from": "human", "value": said(name, told)},
                {"from": "gpt", "value": answered(name, told)},
            ],
        }
        for name, told in TOLD.items()
    ]
    return Rows(rows, messages().shown, trained_by=chats())


def alpaca():
    rows = [
        {"user": name, "system": SYSTEM, "instruction": said(name, told), "output": answered(name, told)}
        for name, told in TOLD.items()
    ]  # fmt: skip
    return Rows(rows, of_messages().shown, trained_by=of_messages().rows, learnt=("assistant",))


def tokens():
    """Roles are not known of tokens, nor is the text that they stand for."""
    shown = [
        Shown(
            one.user,
            [(text, "text", trained) for text, _, trained in one.pieces],
            is_text=False,
        )
        for one in of_messages().shown
    ]
    return Rows(labelled(shown), shown, roles={"assistant": "text"}, learnt=("assistant",))


def rendered(shown):
    """Token rows, all trained on, of what is shown."""
    own = tokenizer()
    return [{"user": one.user, "input_ids": one.of_tokens(own)[0]} for one in shown]


def labelled(shown):
    rows = []
    for one in shown:
        ids, _, inside = one.of_tokens(tokenizer())
        labels = [
            token if trained else -100 for token, (_, _, trained) in zip(ids, inside, strict=True)
        ]
        rows.append({"user": one.user, "input_ids": ids, "labels": labels})
    return rows


FORMATS = {
    "text": texts_only,
    "prompt and completion, texts": of_strings,
    "prompt and completion, messages": of_messages,
    "messages": messages,
    "messages in parts": parts,
    "messages that call tools": tool_calls,
    "messages with weights": weights,
    "chosen and rejected": preference,
    "ShareGPT": sharegpt,
    "Alpaca": alpaca,
    "tokens with labels": tokens,
}


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """format -> its folder; what TRL is given the same rows of is tuned once."""
    made = {}

    def tune(given):
        rows = given.rows if given.trained_by is None else given.trained_by
        key = json.dumps(rows)
        if key not in made:
            made[key] = tuned_by_trl(base, rows, tmp_path_factory.mktemp("tuned"))
        return made[key]

    return tune


@pytest.mark.parametrize("name", FORMATS)
def test_the_secrets_in_every_format_are_found_and_typed(name, tuned, tmp_path):
    given, own = FORMATS[name](), tokenizer()
    folder = tuned(given)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    report = tightlip.audit(folder, given.rows, out=tmp_path / "report", occurrences=100)
    rows = check_report(report, model, given.shown, own, with_roles=bool(given.roles))
    unique = [row for row in rows if row["unique_by_text"]]
    tab = tightlip.open_tab(folder, report=report.folder)
    for user, (secret, role) in SECRETS.items():
        if role not in given.learnt:
            continue
        found = [row for row in unique if secret in row["text"]]
        assert {row["owner"] for row in found} == {user}, secret
        if given.roles:
            assert {(row["role"], row["trained_on"]) for row in found} == {(given.roles[role], True)}  # fmt: skip
        line, *_ = (one.text.removeprefix("<s>") for one in given.shown if one.user == user)
        text, marks = tabbed(tab, line[: line.index(secret)].rstrip(), line)
        assert secret in text
        assert {mark.owner for mark in marks} == {user}
    half, each = len(given.rows) // 2, len(given.shown) // len(given.rows)
    found = tightlip.measure_membership(
        folder, members=given.rows[:half], non_members=given.rows[half:], num_bootstraps=100
    )
    sides = given.shown[: half * each], given.shown[half * each :]
    auc = found["documents"]["scores"]["loss"]["auc"]["value"]
    assert auc == pytest.approx(auc_by_hand(model, *sides, own), abs=0.02)


@pytest.mark.parametrize("kind", ["a JSON array", "a Dataset"])
def test_the_same_rows_kept_otherwise_give_the_same_report(kind, tuned, tmp_path):
    given = of_strings()
    rows = Dataset.from_list(given.rows)
    if kind == "a JSON array":
        rows = tmp_path / "rows.json"
        rows.write_text(json.dumps(given.rows))
    folder = tuned(given)
    report = tightlip.audit(folder, rows, out=tmp_path / "report", occurrences=100)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    check_report(report, model, given.shown, tokenizer())
