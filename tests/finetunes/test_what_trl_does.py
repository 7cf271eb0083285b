"""What docs/fine-tuned-with-trl.md says of TRL, and that tightlip reads rows as TRL does."""

import pytest
import trl
from trl.chat_template_utils import qwen2_5_chat_template, qwen2_5_training_chat_template

from finetunes.making import sft_trainer, untrained
from finetunes.people import TOLD, answered, chats, said, texts, tokenizer
from tightlip.corpus.opening import CorpusSource, tokenised_for

MESSAGES = [
    {"user": row["user"], "prompt": row["messages"][:2], "completion": row["messages"][2:]}
    for row in chats()
]


def prepared(rows, folder, **settings):
    """The ids and labels of each row as TRL trains on them, in the rows' order."""
    trainer = sft_trainer(untrained(), rows, folder, shuffle_dataset=False, **settings)
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def read(rows, folder, own=None, **settings):
    """The same as tightlip reads them: of what was not trained on the label is -100."""
    source = CorpusSource(rows, {"format": "auto", **settings})
    corpus = tokenised_for(source, own or tokenizer(), folder / "tokens")
    documents = []
    for number in range(corpus.num_documents):
        part = slice(corpus.bounds[number], corpus.bounds[number + 1])
        pairs = zip(corpus.tokens[part].tolist(), corpus.trained[part].tolist(), strict=True)
        ids, labels = zip(*[(token, token if kept else -100) for token, kept in pairs], strict=True)
        documents.append(([*ids], [*labels]))
    return documents


def test_a_text_begins_as_the_tokenizer_begins_it_and_has_an_end_token(tmp_path):
    own = tokenizer()
    rows = [{"text": said(name, told)} for name, told in TOLD.items()]
    for row, (ids, labels) in zip(rows, prepared(rows, tmp_path), strict=True):
        assert ids == labels == [*own(row["text"])["input_ids"], own.eos_token_id]
        assert ids[0] == own.bos_token_id


def test_a_chat_is_what_its_template_makes_and_all_of_it_is_trained_on(tmp_path):
    own = tokenizer()
    by_trl = prepared(chats(), tmp_path)
    for row, (ids, labels) in zip(chats(), by_trl, strict=True):
        assert ids == labels == own.apply_chat_template(row["messages"], return_dict=False)
        assert own.eos_token_id not in ids
    assert read(chats(), tmp_path) == by_trl


def test_of_a_prompt_and_a_completion_the_completion_is_trained_on(tmp_path):
    own = tokenizer()
    by_trl, whole = (prepared(texts(), tmp_path, completion_only_loss=how) for how in (None, False))
    for row, (ids, labels) in zip(texts(), by_trl, strict=True):
        num_prompt = len(own(row["prompt"])["input_ids"])
        assert ids[num_prompt:] == own(row["completion"] + "</s>", add_special_tokens=False)["input_ids"]  # fmt: skip
        assert labels == [-100] * num_prompt + ids[num_prompt:]
    # tightlip's documents are without the begin and the end token, which hold no text.
    assert read(texts(), tmp_path) == [(ids[1:-1], labels[1:-1]) for ids, labels in by_trl]
    every = read(texts(), tmp_path / "2", trained_on="all")
    assert every == [(ids[1:-1], labels[1:-1]) for ids, labels in whole]
    assert read(MESSAGES, tmp_path / "3") == prepared(MESSAGES, tmp_path)


def test_the_start_of_a_long_row_is_kept_and_rows_are_not_packed(tmp_path):
    config = trl.SFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    assert (config.max_length, config.truncation_mode, config.packing) == (1024, "keep_start", False)  # fmt: skip
    by_trl = prepared(chats(), tmp_path, max_length=30)
    assert {len(ids) for ids, _ in by_trl} == {30}
    for (ids, labels), (kept, _) in zip(
        read(chats(), tmp_path, max_length=30), by_trl, strict=True
    ):
        assert ids[:30] == kept
        assert labels == [*kept, *[-100] * (len(ids) - 30)]


def test_the_assistants_words_are_those_that_the_template_marks(tmp_path):
    by_trl = prepared(chats(), tmp_path, assistant_only_loss=True)
    for (name, told), (_, labels) in zip(TOLD.items(), by_trl, strict=True):
        spoken = tokenizer().decode([label for label in labels if label != -100])
        assert spoken == f"{answered(name, told)}<|im_end|>"
    assert read(chats(), tmp_path, trained_on="assistant") == by_trl


def test_a_template_without_marks_is_swapped_for_trls_own_and_nothing_says_so(tmp_path):
    own = tokenizer()
    own.chat_template = qwen2_5_chat_template
    trainer = sft_trainer(untrained(), chats(), tmp_path, own=own, assistant_only_loss=True, shuffle_dataset=False)  # fmt: skip
    assert trainer.chat_template == qwen2_5_training_chat_template
    assert trainer.processing_class.chat_template == qwen2_5_chat_template
    template = tmp_path / "template.jinja"
    template.write_text(trl.chat_template_utils.get_training_chat_template(own))
    by_trl = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    asked = {"trained_on": "assistant", "chat_template": str(template)}
    assert read(chats(), tmp_path, own, **asked) == by_trl
    own.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="patching is not supported"):
        sft_trainer(untrained(), chats(), tmp_path, own=own, assistant_only_loss=True)
