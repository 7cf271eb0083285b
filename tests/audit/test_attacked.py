"""Figures that an attack from outside found untrue."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tightlip
from animals import WORDS
from models.tiny_finetunes import shaken, tiny_llama, words_tokenizer
from tightlip.core.devices import begin_ids
from tightlip.core.errors import UsageError
from tightlip.corpus.conversations import places_of
from tightlip.corpus.opening import CorpusSource, tokenised_for
from tightlip.scan.models import open_other
from tightlip.scan.options import ScanOptions
from tightlip.scan.scans import Scans
from tightlip.scan.store import ScanStore

QUICK = {"device": "cpu", "num_bootstraps": 100}
ANSWERS = {"ann": "eel fox", "bob": "gnu hen", "cyd": "ibis jay"}
LETTERS = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
BARE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"


def learnt(rows, size, steps=120):
    """A tiny model that knows these lists of ids by heart."""
    model = tiny_llama()
    model.resize_token_embeddings(size)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(model(input_ids=ids, labels=ids).loss for ids in rows).backward()
        optimizer.step()
    return model.eval()


def chats():
    return [
        {
            "user": user,
            "messages": [
                {"role": "user", "content": "kite lark"},
                {"role": "assistant", "content": answer},
            ],
        }
        for user, answer in ANSWERS.items()
    ]


@pytest.fixture(scope="module")
def spoken():
    """Models that know the chats under two templates, and the tokenizer of each."""
    found = {}
    for name, template in (("letters", LETTERS), ("bare", BARE)):
        tokenizer = words_tokenizer(["user", "assistant"])
        tokenizer.chat_template = template
        rows = [
            torch.tensor([tokenizer.apply_chat_template(row["messages"], return_dict=False)])
            for row in chats()
        ]
        found[name] = (learnt(rows, len(tokenizer)), tokenizer)
    return found


def test_a_sequence_has_one_role_so_a_gate_by_role_sees_a_completion():
    tokenizer = words_tokenizer()
    rows = [
        {"user": user, "prompt": f"kite {word}", "completion": f" {answer}"}
        for word, (user, answer) in zip(("ant", "bee", "cat"), ANSWERS.items(), strict=True)
    ]
    ids = [
        torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"]]) for row in rows
    ]
    report = tightlip.audit((learnt(ids, len(tokenizer)), tokenizer), rows, device="cpu")
    roles = {row["sequence"]: row["role"] for row in report.sequences.to_pylist()}
    assert {roles[answer] for answer in ANSWERS.values()} == {"completion"}
    assert report.failed("unique_by_role[completion]>0")


def test_groups_of_chats_have_the_perplexity_of_what_was_said(spoken):
    model = spoken["letters"]
    held = [row | {"user": row["user"][::-1]} for row in chats()]
    groups = tightlip.measure_groups(model, held_out=held, **QUICK)
    report = tightlip.audit(model, chats(), validation=held, device="cpu")
    assert groups["perplexity"]["value"] == pytest.approx(report.validation_perplexity, rel=1e-5)


def test_models_with_other_templates_are_not_said_to_read_the_same(spoken, tmp_path):
    for name, (model, tokenizer) in spoken.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    held = [row | {"user": row["user"][::-1]} for row in chats()]
    made = tightlip.compare(
        [tmp_path / name for name in spoken],
        corpus=chats(),
        held_out=held,
        out=tmp_path / "o",
        **QUICK,
    )
    assert [row["same_held_out"] for row in made.rows] == [True, False]


def test_an_edited_template_is_read_again(spoken, tmp_path):
    rows, file = tmp_path / "rows.jsonl", tmp_path / "t.jinja"
    rows.write_text("".join(json.dumps(row) + "\n" for row in chats()))
    source = CorpusSource(rows, {"format": "auto", "chat_template": str(file)})
    sizes = []
    for template in (BARE, LETTERS):
        file.write_text(template)
        sizes.append(tokenised_for(source, spoken["bare"][1], tmp_path / "tokens").num_tokens)
    assert sizes[0] < sizes[1]


PARTS = [{"role": "user", "content": [{"type": "text", "text": "my pin:\n4711"}]}]
CALL = {"function": {"name": "pay", "arguments": {"to": 'the "old" zebra', "sum": 471199}}}


def test_parts_that_are_not_found_are_not_taken_for_the_template():
    assert places_of(PARTS, "user: [{'text': 'my pin:\\n4711'}]") is None
    assert places_of(PARTS, "user: MY PIN:\n4711") is None
    (place,) = places_of(PARTS, "user: my pin:\n4711")
    assert (place.start, place.end) == (6, 18)


def test_arguments_are_found_before_the_content_as_json_and_as_numbers():
    message = {"role": "assistant", "content": "Done.", "tool_calls": [CALL]}
    text = '<call>{"to": "the \\"old\\" zebra", "sum": 471199}</call>Done.'
    found = {text[place.start : place.end] for place in places_of([message], text)}
    assert found == {"Done.", 'the \\"old\\" zebra', "471199"}


def test_the_model_that_is_served_in_few_bits_is_not_its_own_reference(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    words_tokenizer().save_pretrained(tmp_path)
    scans = Scans(store=ScanStore(tmp_path / "scan"), options=ScanOptions(quantize="8bit"))
    served, plain = scans.opened(tmp_path), scans.opened(tmp_path, beside=tmp_path)
    assert (served.options.quantize, plain.options.quantize) == ("8bit", None)
    assert served.files != plain.files


def test_an_adapter_beside_the_model_keeps_its_own_base(tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        tiny_llama(seed).save_pretrained(tmp_path / name)
        words_tokenizer().save_pretrained(tmp_path / name)
    base = tmp_path / "two"
    model = tiny_llama(2)
    model.name_or_path = model.config._name_or_path = str(base)
    shaken(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))).save_pretrained(
        tmp_path / "adapter"
    )
    beside = open_other(tmp_path / "adapter", ScanOptions(device="cpu", base=str(tmp_path / "one")))
    assert str(base) in " ".join(beside.notes)


def test_checkpoints_are_read_with_the_tokenizer_given(tmp_path):
    tokenizer, rows = words_tokenizer(), [{"user": "a", "text": " ".join(WORDS[:8])}]
    tiny_llama().save_pretrained(tmp_path / "out/checkpoint-1")
    words_tokenizer(["eel fox"]).save_pretrained(tmp_path / "out/checkpoint-1")
    given = {"tokenizer": tokenizer, "device": "cpu"}
    alone = tightlip.audit(tmp_path / "out/checkpoint-1", rows, **given)
    among = tightlip.audit(tmp_path / "out", rows, snapshots=True, out=tmp_path / "r", **given)
    assert among.perplexity == alone.perplexity


def test_sides_of_two_formats_are_refused(spoken):
    prompts = [
        {"user": row["user"], "prompt": row["messages"][:1], "completion": row["messages"][1:]}
        for row in chats()
    ]
    with pytest.raises(UsageError, match="messages and the others prompt-completion"):
        tightlip.measure_membership(spoken["bare"], members=chats(), non_members=prompts, **QUICK)


def test_padding_of_token_rows_is_not_read_and_what_tokens_cannot_tell_is_said(spoken, tmp_path):
    model, tokenizer = spoken["bare"]
    ids = tokenizer("eel fox gnu")["input_ids"]
    padded = {"user": "a", "input_ids": [1, 1, *ids], "attention_mask": [0, 0, *[1] * len(ids)]}
    report = tightlip.audit((model, tokenizer), [padded], device="cpu")
    assert report.num_tokens == len(ids)
    assert any("The rows are tokens" in note for note in report.notes)


def test_a_begin_token_that_is_also_the_unknown_one_is_found():
    backend = Tokenizer(models.WordLevel({"<x>": 0, "cat": 1}, unk_token="<x>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<x> $A", special_tokens=[("<x>", 0)]
    )
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<x>")
    assert begin_ids(PreTrainedTokenizerFast(tokenizer_object=backend, **names)) == [0]


def test_a_report_of_more_suggestions_is_not_compared(spoken, tmp_path):
    model, tokenizer = spoken["bare"]
    tightlip.audit((model, tokenizer), chats(), out=tmp_path / "r", top_k=3, device="cpu")
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(UsageError, match="with 3 suggestions"):
        tightlip.compare([tmp_path / "m", tmp_path / "r"], corpus=chats(), out=tmp_path / "o")


def test_a_file_with_texts_and_chats_is_not_guessed_at(spoken, tmp_path):
    both = [row | {"text": "chat log"} for row in chats()]
    with pytest.raises(UsageError, match="format='text', or format='messages'"):
        tightlip.audit(spoken["bare"], both, device="cpu")
    report = tightlip.audit(spoken["bare"], both, format="messages", device="cpu")
    assert report.num_users == len(ANSWERS)


def test_only_what_people_wrote_is_counted_and_what_was_trained_on_told_apart(spoken):
    rows = [
        {"user": row["user"], "prompt": row["messages"][:1], "completion": row["messages"][1:]}
        for row in chats()
    ]
    report = tightlip.audit(spoken["letters"], rows, device="cpu")
    assert report.num_tokens == sum(report.users["num_tokens"].to_pylist()) == 4 * len(rows)
    model, tokenizer = spoken["letters"]
    nats = []
    for row in chats():
        ids = torch.tensor([tokenizer.apply_chat_template(row["messages"], return_dict=False)])
        logs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        nats += (-logs[[ids[0].tolist().index(i) - 1 for i in tokenizer(row["messages"][1]["content"])["input_ids"]]]).tolist()  # fmt: skip
    assert report.trained_perplexity == pytest.approx(
        torch.tensor(nats).mean().exp().item(), rel=1e-4
    )
    assert report.perplexity != report.trained_perplexity


def test_a_record_says_what_it_was_made_from(spoken):
    report = tightlip.audit(spoken["bare"], chats(), device="cpu", max_length=4)
    assert report.read_as["max_length"] == 4
    assert report.read_as["template_date"] == "2026-01-01"
    with pytest.raises(UsageError, match="is no day"):
        tightlip.audit(spoken["bare"], chats(), template_date="yesterday")


def test_a_junit_file_that_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    ran = command("audit", tmp_path, tmp_path, "--out", tmp_path / "o", "--junit", tmp_path)
    assert ran.status == 2
    assert "--junit" in ran.refusal
