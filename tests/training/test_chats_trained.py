"""Training on chats: the tokens, the template and the masks are those of transformers and of an audit."""

import json
import math

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import tightlip
from models.tiny_finetunes import save_base, tiny_gpt2, tiny_llama, words_tokenizer
from tightlip.core.errors import UsageError
from tightlip.corpus.prepare import open_prepared, prepare_corpus
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.models.loading import load_tokenizer
from tightlip.training.batches import gather, rows_of
from tightlip.training.config import TrainConfig
from tightlip.training.loop import train_model as train
from tightlip.training.losses import Forward, at_last
from training.by_peft import (
    adapter_in,
    assert_close,
    by_peft,
    clipped_sum_by_autograd,
    named_as_saved,
    padded,
    trained_by_hand,
)
from training.small_corpora import documents

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<s> {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} </s> {% endfor %}"
)
TEXTS = [row["text"] for row in documents(num_documents=36, longest=6)]
CHATS = [
    {
        "user": f"user {number % 5}",
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
            *([{"role": "user", "content": asked}] if number % 2 else []),
        ],
    }
    for number, (asked, answered) in enumerate(zip(TEXTS[:18], TEXTS[18:], strict=True))
]
LONGEST = 24


def tokenizer_with_template():
    tokenizer = words_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_base(tmp_path_factory.mktemp("base") / "llama")
    tokenizer_with_template().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(base, tmp_path_factory):
    config = PrepareConfig(tokenizer=str(base), split="none", trained_on="assistant")
    return prepare_corpus(CHATS, tmp_path_factory.mktemp("corpus") / "prepared", config)


def by_transformers(chats):
    """The ids of each chat, and as labels those that its template says the assistant made."""
    tokenizer, made = tokenizer_with_template(), []
    for chat in chats:
        encoded = tokenizer.apply_chat_template(
            chat["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        made.append((encoded["input_ids"], [ids if mask else -100 for ids, mask in pairs]))
    return made


def rows_in(prepared, sequence_length=LONGEST):
    tokenizer = load_tokenizer(prepared.tokenizer_folder)
    return rows_of(prepared.train, sequence_length=sequence_length, bos=tokenizer.bos_token_id)


def shown(rows):
    """Each row's ids and labels, as a batch of its own holds them."""
    batches = [gather(rows, np.array([place])) for place in range(len(rows))]
    return [(each.input_ids_BT[0].tolist(), each.labels_BT[0].tolist()) for each in batches]


def adapting(base, **settings):
    plain = {"lora": 2, "sequence_length": LONGEST, "optimizer": "sgd", "learning_rate": 0.05}
    return TrainConfig.of(model=str(base), **{**plain, **settings})


def test_rows_are_what_transformers_makes_of_the_chats(corpus):
    assert shown(rows_in(corpus)) == by_transformers(CHATS)


@pytest.mark.parametrize("sequence_length", [1, 3, 7])
def test_a_chat_that_is_cut_has_every_trained_token_as_a_target_once(sequence_length, corpus):
    rows = rows_in(corpus, sequence_length)
    wanted = [label for _, labels in by_transformers(CHATS) for label in labels if label != -100]
    assert rows.targets().tolist() == wanted
    labels = [label for _, labels in shown(rows) for label in labels if label != -100]
    assert labels == wanted
    assert rows.num_targets.sum() == len(wanted)
    assert (rows.num_targets > 0).all()


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_losses_over_masks_are_those_of_transformers_however_rows_are_padded(make, corpus):
    model, rows = make().eval(), rows_in(corpus)
    forward, chosen = Forward(model), np.arange(len(rows))
    batch = gather(rows, chosen, widths=(40,))
    with torch.no_grad():
        expected = model(**padded(by_transformers(CHATS))).loss
        torch.testing.assert_close(forward.mean_loss(batch), expected)
        hidden = model.base_model(input_ids=batch.inputs).last_hidden_state
        alone = [gather(rows, chosen[place : place + 1]) for place in chosen]
        last = [model.base_model(input_ids=each.inputs).last_hidden_state[0, -1] for each in alone]
        torch.testing.assert_close(at_last(hidden, batch), torch.stack(last), rtol=1e-4, atol=1e-4)


def test_a_plain_run_on_chats_is_the_loop_by_hand_on_their_masks(base, corpus, tmp_path):
    config = adapting(base, steps=3, batch_size=len(CHATS), momentum=0.5)
    run = train(corpus, tmp_path / "run", config)
    labelled = by_transformers(CHATS)
    expected = trained_by_hand(by_peft(base), labelled, steps=3, rate=0.05, momentum=0.5)
    assert_close(adapter_in(run.model_folder), expected, rtol=1e-4, atol=1e-6)


def test_a_private_run_on_chats_clips_each_rows_user(base, corpus, tmp_path):
    clip, num_users = 0.2, 5
    config = adapting(
        base, steps=1, batch_size=num_users, learning_rate=1.0, mitigation="dp", noise_multiplier=0.0,
        clip_norm=clip, rows_per_unit=9,
    )  # fmt: skip
    labelled, texts = by_transformers(CHATS), {}
    for chat, text in zip(CHATS, labelled, strict=True):
        texts.setdefault(chat["user"], []).append(text)
    model = by_peft(base).eval()
    start = {name: each.detach().clone() for name, each in named_as_saved(model).items()}
    total = clipped_sum_by_autograd(model, texts, clip)
    run = train(corpus, tmp_path / "run", config)
    assert run.guarantee["num_units"] == num_users
    largest = max(float(each.abs().max()) for each in total.values()) / num_users
    expected = {name: start[name] - total[name] / num_users for name in start}
    assert_close(adapter_in(run.model_folder), expected, rtol=0, atol=5e-3 * largest)


def test_an_audit_of_the_run_reads_what_was_trained_on(tmp_path):
    """By the figures of one who knows the chats, the template and the adapter only."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    plain = save_base(tmp_path / "plain")  # whose tokenizer has no template of its own
    prepare = {"chat_template": str(tmp_path / "template.jinja"), "trained_on": "assistant"}
    size = {"lora": 2, "epochs": 2, "sequence_length": LONGEST}
    run = tightlip.train(
        CHATS, tmp_path / "run", model=str(plain), prepare={**prepare, "split": "none"}, **size
    )
    assert load_tokenizer(run.model_folder).chat_template == TEMPLATE
    summary = tightlip.audit(str(run.folder), out=tmp_path / "report").summary
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(plain), run.model_folder
    ).eval()
    with torch.no_grad():
        loss = model(**padded(by_transformers(CHATS))).loss
    assert summary["trained_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


SAME = [
    {"user": "ann", "instruction": asked, "output": answered}
    for asked, answered in zip(TEXTS[:18], TEXTS[18:], strict=True)
]


def test_other_formats_are_the_chats_that_they_stand_for(base, tmp_path):
    def rows_from(rows, name):
        config = PrepareConfig(tokenizer=str(base), split="none", trained_on="all")
        return shown(rows_in(prepare_corpus(rows, tmp_path / name, config)))

    messages = [
        [{"role": "user", "content": row["instruction"]},
         {"role": "assistant", "content": row["output"]}] for row in SAME
    ]  # fmt: skip
    expected = rows_from([{"user": "ann", "messages": each} for each in messages], "messages")
    names = {"user": "human", "assistant": "gpt"}
    turns = [[{"from": names[m["role"]], "value": m["content"]} for m in each] for each in messages]
    assert rows_from([{"user": "ann", "conversations": each} for each in turns], "g") == expected
    assert rows_from(SAME, "alpaca") == expected


def test_of_prompts_the_completion_is_trained_on_after_the_begin_token(base, tmp_path):
    pairs = [(row["instruction"] + " ", row["output"]) for row in SAME]
    rows = [{"user": "ann", "prompt": prompt, "completion": said} for prompt, said in pairs]
    config = PrepareConfig(tokenizer=str(base), split="none")
    tokenizer, expected = words_tokenizer(), []
    for prompt, said in pairs:
        before, after = tokenizer(prompt).input_ids, tokenizer(said).input_ids
        ids = [tokenizer.bos_token_id, *before, *after]
        expected.append((ids, [-100] * (1 + len(before)) + after))
    assert shown(rows_in(prepare_corpus(rows, tmp_path / "prepared", config))) == expected


def test_what_is_held_out_of_chats_is_scored_over_its_masks(base, tmp_path):
    how = {"split": "text", "holdout": 0.4, "trained_on": "assistant"}
    run = tightlip.train(
        CHATS, tmp_path / "run", model=str(base), prepare=how, lora=2, steps=2, sequence_length=LONGEST
    )  # fmt: skip
    prepared = open_prepared(run.corpus_folder)
    assert prepared.validation is not None
    held = {prepared.validation.document(place).tobytes() for place in range(
        prepared.validation.num_documents)}  # fmt: skip
    labelled = by_transformers(CHATS)
    kept = [text for text in labelled if np.array(text[0], np.int32).tobytes() in held]
    assert 0 < len(kept) < len(CHATS)
    assert prepared.train.num_documents + len(kept) == len(CHATS)
    base_model = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(base_model, run.model_folder).eval()
    with torch.no_grad():
        loss = float(model(**padded(kept)).loss)
    assert run.metrics[-1]["validation_loss_nats"] == pytest.approx(loss, rel=1e-4)


def test_a_run_does_not_go_on_with_other_masks(base, tmp_path):
    size = {"lora": 2, "steps": 1, "sequence_length": LONGEST}
    for folder, trained_on in (("some", "assistant"), ("all", "all")):
        config = PrepareConfig(tokenizer=str(base), split="none", trained_on=trained_on)
        prepare_corpus(CHATS, tmp_path / folder, config)
    tightlip.train(tmp_path / "some", tmp_path / "run", model=str(base), **size)
    with pytest.raises(UsageError, match=r"other settings \(rows_fingerprint\)"):
        tightlip.train(tmp_path / "all", tmp_path / "run", model=str(base), **size)


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"user": "a", "input_ids": [3, 4, 5]}], {}, "holds tokens, whose text nobody knows"),
        (
            [{"user": "a", "prompt": "ant", "chosen": "bee", "rejected": "cat"}],
            {},
            "of which one answer is not to be learnt",
        ),
        (CHATS, {"tokenizer": None}, "a model's tokenizer says. Give model=DIR or"),
        (CHATS, {"scrub": True}, "scrub=True works on plain text"),
        (CHATS, {"deduplicate": "documents"}, "deduplicate=documents works on plain text"),
        ([{"user": "a", "text": "ant"}], {"trained_on": "assistant"}, "is plain text, all of"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(rows, settings, words, base, tmp_path):
    with pytest.raises(UsageError, match=words):
        tightlip.prepare(rows, tmp_path / "prepared", **{"tokenizer": str(base), **settings})
    assert not (tmp_path / "prepared").exists()


def test_the_table_of_prepared_chats_is_refused_since_its_masks_are_not_in_it(
    base, corpus, tmp_path
):
    how = {"tokenizer": str(base)}
    for table in (corpus.folder / "train.parquet", corpus.folder):
        with pytest.raises(UsageError, match="its table holds the marks of their template"):
            tightlip.prepare(table, tmp_path / "prepared", **how)
    with pytest.raises(UsageError, match="its table holds the marks"):
        tightlip.prepare(
            CHATS, tmp_path / "prepared", validation=corpus.folder / "train.parquet", **how
        )


def test_held_out_chats_are_as_likely_in_a_prepared_folder_as_by_themselves(base, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(map(json.dumps, CHATS[12:])))
    made = tightlip.prepare(CHATS[:12], tmp_path / "made", validation=held, tokenizer=str(base))
    asked = (held, made.folder / "validation")
    by_rows, by_folder = (tightlip.audit(base, CHATS[:12], validation=each) for each in asked)
    assert by_rows.validation_perplexity == pytest.approx(by_folder.validation_perplexity)
    copy = tmp_path / "copy.parquet"
    copy.write_bytes((made.folder / "validation.parquet").read_bytes())
    for table in (made.folder / "validation.parquet", copy):
        for refused in (
            lambda table=table: tightlip.audit(base, CHATS[:12], validation=table),
            lambda table=table: tightlip.audit(base, table),
            lambda table=table: tightlip.compare([base, tmp_path], corpus=CHATS, held_out=table),
            lambda table=table: tightlip.measure_membership(
                base, members=CHATS[:12], non_members=table
            ),
        ):
            with pytest.raises(UsageError, match="its table holds the marks of their template"):
                refused()


def test_chats_prepared_by_another_template_are_not_taken_for_these(base, tmp_path):
    file = tmp_path / "template.jinja"
    how = {"tokenizer": str(base), "chat_template": str(file), "split": "none"}
    file.write_text(TEMPLATE)
    made = tightlip.prepare(CHATS, tmp_path / "prepared", **how)
    assert (
        tightlip.prepare(CHATS, tmp_path / "prepared", **how).train.num_tokens
        == made.train.num_tokens
    )
    file.write_text(TEMPLATE.replace("</s>", ""))
    with pytest.raises(UsageError, match="another source, tokenizer or chat template"):
        tightlip.prepare(CHATS, tmp_path / "prepared", **how)
