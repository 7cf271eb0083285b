"""Chats and other rows of fine-tuning: read, rendered, cut into tokens with roles and masks."""

import json
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import tightlip
from tightlip.core.errors import UsageError
from tightlip.corpus import rendering
from tightlip.corpus.opening import CorpusSource, tokenised_for
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.rendering import Renderer, TemplateError

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "My card is 4711 0815"},
    {"role": "assistant", "content": "Noted: 4711 0815"},
]


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([json.dumps(CHAT)], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>"
    )
    made.chat_template = CHATML
    return made


def read(rows, tokenizer, folder, **settings):
    """Of each document: its user, and (text, role, was it trained on) of its stretches."""
    source = CorpusSource(rows, {"format": "auto", **settings})
    corpus = tokenised_for(source, tokenizer, folder / "tokens")
    documents = []
    for number in range(corpus.num_documents):
        part = slice(corpus.bounds[number], corpus.bounds[number + 1])
        ids, roles, trained = (x[part] for x in (corpus.tokens, corpus.roles, corpus.trained))
        stretches = []
        kind = roles.astype(int) * 2 + trained
        for piece in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(kind)) + 1):
            role = corpus.role_names[roles[piece[0]]]
            stretches.append((tokenizer.decode(ids[piece]), role, bool(trained[piece[0]])))
        documents.append((corpus.user_names[corpus.users[number]], stretches))
    return documents


def said(document):
    """What each role said, and whether it was trained on, without the template."""
    return [one for one in document[1] if one[1] != "template"]


def test_a_chat_is_the_text_of_its_template_and_each_token_has_a_role(tokenizer, tmp_path):
    ((user, stretches),) = read([{"user": "ann", "messages": CHAT}], tokenizer, tmp_path)
    assert user == "ann"
    plain = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert "".join(text for text, _, _ in stretches) == plain
    assert said((user, stretches)) == [(m["content"], m["role"], True) for m in CHAT]


ROWS = {
    "messages": {"messages": CHAT},
    "messages as JSON": {"messages": json.dumps(CHAT)},
    "sharegpt": {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": CHAT[1]["content"]},
            {"from": "gpt", "value": CHAT[2]["content"]},
        ],
    },
    "alpaca": {
        "system": "Be brief.",
        "instruction": CHAT[1]["content"],
        "output": CHAT[2]["content"],
    },
    "prompt-completion": {"prompt": CHAT[:2], "completion": CHAT[2:]},
}


@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_chat_becomes_the_same_text(name, tokenizer, tmp_path):
    (document,) = read([{"user": "ann"} | ROWS[name]], tokenizer, tmp_path, trained_on="all")
    assert said(document) == [(m["content"], m["role"], True) for m in CHAT]


def test_a_file_with_lists_of_messages_reads_like_a_list(tokenizer, tmp_path):
    rows = [{"user": "ann", "messages": [*CHAT]}, {"user": "bob", "messages": CHAT[1:]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = read(rows, tokenizer, tmp_path)
    for name in ("c.parquet", "c.jsonl"):
        assert read(tmp_path / name, tokenizer, tmp_path / name.replace(".", "")) == expected


def test_prompt_and_completion_train_the_completion(tokenizer, tmp_path):
    rows = [{"user": "ann", "prompt": CHAT[:2], "completion": CHAT[2:]}]
    (document,) = read(rows, tokenizer, tmp_path)
    led = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    untrained = "".join(text for text, _, trained in document[1] if not trained)
    assert untrained == led
    assert [role for _, role, trained in document[1] if trained] == ["assistant", "template"]


def test_prompt_and_completion_may_be_texts(tokenizer, tmp_path):
    rows = [{"user": "ann", "prompt": "My PIN is", "completion": " 4711"}]
    ((_, stretches),) = read(rows, tokenizer, tmp_path)
    assert stretches == [("My PIN is", "prompt", False), (" 4711", "completion", True)]


def test_what_the_template_says_the_assistant_writes(tokenizer, tmp_path):
    rows = [{"user": "ann", "messages": CHAT}]
    (document,) = read(rows, tokenizer, tmp_path, trained_on="assistant")
    trained = "".join(text for text, _, is_trained in document[1] if is_trained)
    assert trained == "Noted: 4711 0815<|im_end|>"
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UsageError, match="where the assistant speaks"):
        read(rows, tokenizer, tmp_path / "2", trained_on="assistant", chat_template=str(plain))


def test_weights_of_messages_say_what_was_trained_on(tokenizer, tmp_path):
    weighed = [m | {"weight": int(m["role"] == "assistant")} for m in CHAT]
    (document,) = read([{"user": "ann", "messages": weighed}], tokenizer, tmp_path)
    assert [trained for _, _, trained in said(document)] == [False, False, True]


def test_a_row_that_training_cut_off_is_trained_on_up_to_there(tokenizer, tmp_path):
    (document,) = read([{"user": "a", "messages": CHAT}], tokenizer, tmp_path, max_length=10)
    ids = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    trained = "".join(text for text, _, is_trained in document[1] if is_trained)
    assert trained == tokenizer.decode(ids[:10])


def test_chosen_and_rejected_are_two_documents_of_one_user(tokenizer, tmp_path):
    rows = [{"user": "ann", "prompt": "Who?", "chosen": " Ann", "rejected": " Bob"}]
    found = read(rows, tokenizer, tmp_path)
    assert [(user, said((user, parts))[-1][0]) for user, parts in found] == [
        ("ann", " Ann"), ("ann", " Bob"),
    ]  # fmt: skip


def test_tokens_come_as_they_are_with_their_labels(tokenizer, tmp_path):
    ids = tokenizer("My PIN is 4711", add_special_tokens=False)["input_ids"]
    labels = [-100] * 3 + ids[3:]
    ((_, stretches),) = read(
        [{"user": "a", "input_ids": ids, "labels": labels}], tokenizer, tmp_path
    )
    assert "".join(text for text, _, _ in stretches) == "My PIN is 4711"
    assert [trained for _, _, trained in stretches] == [False, True]


@pytest.mark.parametrize(
    ("row", "because"),
    [
        ({"messages": []}, "no list in column 'messages'"),
        ({"messages": [{"content": "x"}]}, "without a role"),
        ({"messages": [CHAT[0] | {"weight": 2}]}, "neither 0 nor 1"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"input_ids": ["1"]}, "something else than whole numbers"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "without a known 'from'"),
    ],
)
def test_a_row_that_is_no_chat_is_named_or_skipped(row, because, tokenizer, tmp_path):
    rows = [{"user": "ann"} | row]
    with pytest.raises(UsageError, match=rf"row 1 .*{because}"):
        read(rows, tokenizer, tmp_path)
    good = ROWS["messages"]
    if "messages" in row:
        found = read([*rows, {"user": "b"} | good], tokenizer, tmp_path / "2", bad_rows="skip")
        assert [user for user, _ in found] == ["b"]


def test_a_template_that_drops_what_somebody_said_is_refused(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[-1].content }}")
    with pytest.raises(
        UsageError, match=r"row 1 holds a message that the chat template leaves out"
    ):
        read([{"user": "a", "messages": CHAT}], tokenizer, tmp_path, chat_template=str(path))


def test_without_a_template_chats_are_refused_with_what_to_give(tokenizer, tmp_path):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UsageError, match="chat_template=FILE"):
        read([{"user": "a", "messages": CHAT}], plain, tmp_path)


@pytest.mark.parametrize(
    "row",
    [{"prompt": "My PIN is", "completion": " 4711"}, {"chosen": "My PIN is 4711", "rejected": "x"}],
)
def test_texts_need_no_template(row, tokenizer, tmp_path):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    rows = [{"user": "a"} | row]
    assert read(rows, plain, tmp_path) == read(rows, tokenizer, tmp_path / "2")


@pytest.mark.parametrize("path", ["/dev/zero", "/nowhere", "/tmp"])
def test_a_template_that_is_no_file_is_refused(path, tokenizer, tmp_path):
    with pytest.raises(UsageError, match="as a chat template is"):
        read([{"user": "a", "messages": CHAT}], tokenizer, tmp_path, chat_template=path)


def test_what_reads_plain_text_refuses_chats():
    corpus = open_corpus([{"user": "a", "messages": CHAT}], format="auto")
    with pytest.raises(UsageError, match="holds messages, and this reads plain text"):
        next(corpus.batches())


HOSTILE = {
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}": "run for more",
    "{{ 'a' * 2000000000 }}": "MemoryError",
    "{{ 'a' * 20000000 }}": "ValueError",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
    "{{ 7 ** (10 ** 8) }}": "chat template",
    "{{ raise_exception('no system') }}": "no system",
}


@pytest.mark.slow
@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_ends_with_a_clear_error_in_time(template, monkeypatch):
    monkeypatch.setattr(rendering, "MOST_SECONDS", 3.0)
    hostile = Renderer(template, date="2026-01-01", values={})
    with hostile, pytest.raises(UsageError, match=HOSTILE[template]):
        hostile.render(CHAT)
    with Renderer("{{ messages[0].role }}", date="2026-01-01", values={}) as renderer:
        assert renderer.render(CHAT)[0] == "system"


def test_a_template_that_complains_quotes_no_chat():
    template = "{{ raise_exception('roles must alternate: ' ~ messages[1].content) }}"
    renderer = Renderer(template, date="2026-01-01", values={})
    with renderer, pytest.raises(TemplateError) as refused:
        renderer.render(CHAT)
    assert "4711" not in str(refused.value)


def test_a_renderer_goes_on_after_a_chat_that_failed():
    template = "{% if messages[0].role == 'bad' %}{{ 1 // 0 }}{% endif %}fine {{ strftime_now('%d %b %Y') }}"
    with Renderer(template, date="2026-01-02", values={}) as renderer:
        with pytest.raises(TemplateError, match="ZeroDivisionError"):
            renderer.render([{"role": "bad", "content": ""}])
        assert renderer.render(CHAT)[0] == "fine 02 Jan 2026"


DATED = "{{ word }} {{ messages[0].role }} {{ strftime_now('%d %b %Y') }}"


def rendered(date, word):
    """What a template makes of a chat, and the process that it did it in."""
    with Renderer(DATED, date=date, values={"word": word}) as renderer:
        return renderer.render(CHAT)[0], renderer._child.pid


def test_the_next_template_runs_in_the_same_process_with_its_own_day_and_values():
    first, process = rendered("2026-01-02", "one")
    second, same = rendered("2025-03-04", "two")
    assert (first, second) == ("one system 02 Jan 2026", "two system 04 Mar 2025")
    assert process == same


def test_a_process_that_owes_an_answer_is_not_used_again(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with Renderer(DATED, date="2026-01-02", values={"word": "one"}) as renderer:
        renderer.render(CHAT)
        process = renderer._child.pid
        with monkeypatch.context() as changed:
            changed.setattr(rendering, "_receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                renderer.render(CHAT)
    text, another = rendered("2025-03-04", "two")
    assert text == "two system 04 Mar 2025"
    assert process != another


def test_a_fork_does_not_use_its_parents_process(monkeypatch):
    _, process = rendered("2026-01-02", "one")
    monkeypatch.setattr(rendering.os, "getpid", lambda: 1)
    _, another = rendered("2026-01-02", "one")
    assert process != another


class Parrot(torch.nn.Module):
    """Knows by heart what follows each pair of tokens."""

    def __init__(self, size, texts):
        super().__init__()
        self.size, self.weight = size, torch.nn.Parameter(torch.zeros(1))
        self.next = {
            (a, b): c for ids in texts for a, b, c in zip(ids, ids[1:], ids[2:], strict=False)
        }

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, self.size)
        for row, ids in enumerate(input_ids.tolist()):
            for place in range(1, len(ids)):
                known = self.next.get((ids[place - 1], ids[place]))
                if known is not None:
                    logits[row, place, known] = 9.0
        return SimpleNamespace(logits=logits)


def test_an_audit_of_chats_finds_the_secret_its_owner_and_its_role(tokenizer, tmp_path):
    rows = [{"user": "ann", "messages": CHAT}]
    rows += [
        {"user": user, "messages": [CHAT[0], {"role": "user", "content": f"Hello from {user}"}]}
        for user in ("bob", "cyd", "dan")
    ]
    texts = [tokenizer.apply_chat_template(r["messages"], return_dict=False) for r in rows]
    model = Parrot(len(tokenizer), texts)
    report = tightlip.audit(
        model, rows, tokenizer=tokenizer, out=tmp_path / "r", short_prefix=2,
        contexts=("short", "start", "template", "other"),
    )  # fmt: skip
    assert report.leaks_short == report.leaks > 0  # two tokens are all that it looks at
    assert report.contexts["short"]["tokens"] == 1
    found = [
        (row["sequence"], row["role"], row["trained_on"], owner)
        for row, owner in zip(
            report.sequences.to_pylist(), report.owners["owner"].to_pylist(), strict=True
        )
        if row["unique_by_text"]
    ]
    assert any("4711" in text and role == "user" and who == "ann" for text, role, _, who in found)
    assert all("im_start" not in text and "assistant\n" not in text for text, *_ in found)
    assert {who for *_, who in found} <= {"ann", "bob", "cyd", "dan"}
    assert sum(report.unique_by_role.values()) == report.unique_by_text == len(found)
    num_of_role = Counter(role for _, role, _, _ in found)
    page = (tmp_path / "r/report.html").read_text()
    listed = ", ".join(f"{num} {role}" for role, num in num_of_role.most_common())
    assert f"Sequences by role: {listed}." in page


def test_words_beside_a_templates_letters_are_their_users_own(tokenizer):
    """Nothing stands between a role and a content: `usermy card`."""
    glued = deepcopy(tokenizer)
    glued.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    rows = [
        {"user": user, "messages": [{"role": "user", "content": said}]}
        for user, said in (("ann", "zanzibar 4711"), ("bob", "quixotic 0815"))
    ]
    texts = [glued.apply_chat_template(row["messages"], return_dict=False) for row in rows]
    report = tightlip.audit(Parrot(len(glued), texts), rows, tokenizer=glued)
    unique = [row for row in report.sequences.to_pylist() if row["users_in_d"] == 1]
    assert unique
    assert {row["users_by_text"] for row in unique} == {1}
    assert report.leaks >= report.people_affected == 2


def test_what_the_template_says_is_nobodys_word(tokenizer):
    rows = [{"user": "ann", "messages": CHAT}]
    shown = CorpusSource(rows, {"format": "auto"}).shown_to(tokenizer)
    (batch,) = shown.batches()
    assert batch.texts == [tokenizer.apply_chat_template(CHAT, tokenize=False)]
    (spoken,) = batch.attributes["spoken"]
    assert spoken.split() == " ".join(m["content"] for m in CHAT).split()
    assert len(spoken) == len(batch.texts[0])


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "a", "completion": " b"}, "assistant"),
        ({"prompt": "a", "completion": " b"}, "labels"),
        ({"messages": CHAT}, "labels"),
        ({"messages": CHAT}, "completion"),
        ({"input_ids": [5, 6]}, "completion"),
        ({"input_ids": [5, 6]}, "labels"),
        ({"text": "plain"}, "assistant"),
    ],
)
def test_a_question_that_the_rows_do_not_answer_is_refused(row, asked, tokenizer, tmp_path):
    with pytest.raises(UsageError, match="trained_on"):
        read([{"user": "a"} | row], tokenizer, tmp_path, trained_on=asked)


def test_rows_of_two_kinds_are_refused(tokenizer, tmp_path):
    rows = [{"user": "a", "prompt": "x", "completion": "y"}]
    rows += [{"user": "a", "prompt": CHAT[:2], "completion": CHAT[2:]}]
    with pytest.raises(UsageError, match="row 2 is of another kind"):
        read(rows, tokenizer, tmp_path)


@pytest.mark.parametrize(("begins", "num_kept"), [(True, 3), (False, 4)])
def test_a_begin_token_counts_towards_what_training_kept(tokenizer, tmp_path, begins, num_kept):
    ids = tokenizer("abcdefgh ijkl", add_special_tokens=False)["input_ids"]
    tokenizer = deepcopy(tokenizer)
    if begins:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    rows = [{"user": "a", "prompt": "abcdefgh", "completion": " ijkl"}]
    ((_, stretches),) = read(rows, tokenizer, tmp_path, trained_on="all", max_length=4)
    kept = "".join(text for text, _, trained in stretches if trained)
    assert kept == tokenizer.decode(ids[:num_kept])


def test_what_somebody_wrote_in_a_roles_place_is_not_told(tokenizer, tmp_path):
    chat = [{"role": "my PIN is 4711", "content": "hello"}]
    ((_, stretches),) = read([{"user": "a", "messages": chat}], tokenizer, tmp_path)
    assert ("hello", "other", True) in stretches
