"""The report of rows of fine-tuning by brute force: written from the definitions, with no tightlip."""

from dataclasses import dataclass

import pytest
from sklearn.metrics import roc_auc_score

from audit.leakage.test_by_text import groups_of, leaks_by_hand, users_by_hand
from finetunes.people import SPECIAL
from oracle import collect, features_of, predictions_at_once

COUNTS = ("total_in_s", "users_in_s", "total_in_d", "users_in_d", "copied")


@dataclass(frozen=True)
class Shown:
    """A document as a model was shown it.

    `pieces` are (text, role, trained on), the role None for what no message says; `begins` tells
    whether the tokenizer's begin token stands before it; `is_text` is False where only tokens are known.
    """

    user: str
    pieces: list
    begins: bool = False
    is_text: bool = True

    @property
    def text(self):
        return "".join(text for text, _, _ in self.pieces)

    @property
    def spoken(self):
        """The text with line breaks for what no message says."""
        return "".join(
            text if role is not None else "\n" * len(text) for text, role, _ in self.pieces
        )

    def of_tokens(self, tokenizer):
        """Its ids, their places, and of each the piece that it stands in."""
        called = tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=True)
        ends, length = [], 0
        for text, _, _ in self.pieces:
            length += len(text)
            ends.append(length)
        inside = []
        for start, end in called["offset_mapping"]:
            number = next(number for number, limit in enumerate(ends) if start < limit)
            assert end <= ends[number], "a token of two messages: not what these rows are for"
            inside.append(self.pieces[number])
        return called["input_ids"], called["offset_mapping"], inside


def chat_shown(user, messages, *, trained=lambda message: True):
    """A chat by the template of people.py, written out by hand."""
    pieces = [("<s>", None, True)]
    for message in messages:
        weight, role = trained(message), message["role"]
        pieces.append((f"<|im_start|>{role}\n", None, weight))
        for call in message.get("tool_calls", ()):
            ((name, value),) = call["function"]["arguments"].items()
            pieces += [(f'{{"{name}": "', None, weight), (value, role, weight), ('"}', None, weight)]  # fmt: skip
        content = message["content"]
        if isinstance(content, str):
            pieces.append((content, role, weight))
        else:
            for part in content:
                pieces += [(part["text"], role, weight), ("|", None, weight)]
        pieces += [("<|im_end|>\n", None, weight)]
    return Shown(user, [piece for piece in pieces if piece[0]])


def text_shown(user, prompt, completion, *, trained=(True, True), roles=("prompt", "completion")):
    pieces = zip((prompt, completion), roles, trained, strict=True)
    return Shown(user, [*pieces], begins=True)


def report_by_hand(model, shown, tokenizer, *, top_k=1):
    """The rows of sequences.parquet by their ids, and the leaks, each as the ids of its sequences."""
    parts = [one.of_tokens(tokenizer) for one in shown]
    documents = [(one.user, ids) for one, (ids, _, _) in zip(shown, parts, strict=True)]
    unspoken = {
        (number, place)
        for number, (_, _, inside) in enumerate(parts)
        for place, (_, role, _) in enumerate(inside)
        if role is None
    }
    breaks = {
        (number, place)
        for number, (_, _, inside) in enumerate(parts)
        for place in range(1, len(inside))
        if inside[place][1] != inside[place - 1][1]
    }
    (begins,) = {one.begins for one in shown}
    textless = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    entries = collect(
        model, documents, tokenizer.bos_token_id if begins else None, textless, top_k,
        unspoken=unspoken, breaks=breaks, predict=predictions_at_once,
    )  # fmt: skip
    rows = features_of(entries, documents)
    for user, number, start, ids, _ in reversed(entries):  # the first one stays
        pieces = parts[number][2][start : start + len(ids)]
        trained = any(is_trained for _, _, is_trained in pieces)
        rows[tuple(ids)] |= {"owner": user, "role": pieces[0][1], "trained_on": trained}
    encoded = [(ids, spans) for ids, spans, _ in parts]
    texts = [(one.user, one.spoken) for one in shown]
    for ids, row in rows.items():
        is_unique = row["users_in_d"] == 1
        users = None
        if is_unique and shown[0].is_text:
            users = users_by_hand(list(ids), texts, encoded)
            is_unique = users is not None and len(users) == 1
        row |= {"users_by_text": users and len(users), "unique_by_text": is_unique}
        if row["users_in_d"] > 1:
            row["owner"] = None
    unique = {ids: list(ids) for ids, row in rows.items() if row["unique_by_text"]}
    return rows, leaks_by_hand(unique, encoded)


def check_report(report, model, shown, tokenizer, *, with_roles=True):
    """Everything that the report counts is what brute force counts; returns the rows by hand."""
    expected, leaks = report_by_hand(model, shown, tokenizer)
    rows, owners = report.sequences.to_pylist(), report.owners["owner"].to_pylist()
    found = {tuple(row["token_ids"]): row | {"owner": o} for row, o in zip(rows, owners, strict=True)}  # fmt: skip
    assert found.keys() == expected.keys()
    for ids, row in expected.items():
        same = [*COUNTS, "users_by_text", "unique_by_text", "owner"]
        same += ["role", "trained_on"] if with_roles else []
        assert {name: found[ids][name] for name in same} == {name: row[name] for name in same}
        assert found[ids]["perplexities"] == pytest.approx(row["perplexities"], rel=1e-3)
    named = [tuple(row["token_ids"]) for row in rows]
    assert {frozenset(named[place] for place in group) for group in groups_of(rows)} == leaks
    summary, unique = report.summary, [row for row in expected.values() if row["unique_by_text"]]
    assert summary["leaks"] == len(leaks)
    assert summary["unique"] == sum(row["users_in_d"] == 1 for row in expected.values())
    assert summary["unique_by_text"] == len(unique)
    assert summary["people_affected"] == len({row["owner"] for row in unique})
    if with_roles:
        by_role = {row["role"]: 0 for row in unique}
        for row in unique:
            by_role[row["role"]] += 1
        assert {role: n for role, n in summary["unique_by_role"].items() if n} == by_role
    return [row | {"text": tokenizer.decode(ids)} for ids, row in expected.items()]


def tabbed(tab, typed, line):
    """What stands there when TAB is pressed until it is as long as the line, or the model has no more
    to say; and whose it is."""
    text = typed
    while len(text) < len(line) and (ghost := tab.complete(text, whole=True).text):
        text += ghost
    return text, tab.marks(text, [False] * len(typed) + [True] * (len(text) - len(typed)))


def auc_by_hand(model, members, others, tokenizer):
    """How often a member's loss is below another's, over what was said and trained on; what stands
    on both sides is on neither."""
    sides = [_losses(model, side, tokenizer) for side in (members, others)]
    ids = [{ids for ids, _ in side} for side in sides]
    kept = [
        [loss for one, loss in side if one not in other]
        for side, other in zip(sides, ids[::-1], strict=True)
    ]
    told = [1] * len(kept[0]) + [0] * len(kept[1])
    return roc_auc_score(told, [-loss for side in kept for loss in side])


def _losses(model, shown, tokenizer):
    found = []
    for one in shown:
        ids, _, inside = one.of_tokens(tokenizer)
        answers = predictions_at_once(model, ids, tokenizer.bos_token_id if one.begins else None)
        special = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
        nats = []
        for token, answer, (_, role, trained) in zip(ids, answers, inside, strict=True):
            # Of rows that are tokens nobody knows who says them.
            is_said = role is not None if one.is_text else token not in special
            if answer is not None and is_said and trained:
                nats.append(-answer[1])
        if nats:
            found.append((tuple(ids), sum(nats) / len(nats)))
    return found
