"""What a private trainer is refused, each before its first step and with what to change."""

import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from finetunes.people import chats, tokenizer
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.trainer import LeakageCallback, PrivacySpec, PrivateSFTTrainer, PrivateTrainer
from trainer.private_runs import lora, private_sft, settings, several, small

ROWS = Dataset.from_list(several(chats()))
IDS = [{"input_ids": [0, 5, 6, 7], "labels": [-100, 5, 6, 7], "user": f"u{n}"} for n in range(8)]
GATED = [{"user": "ann", "text": "a word"}]


class Watching(LeakageCallback):
    """Of another name."""


EVALUATED = {"eval_dataset": ROWS}
REFUSED = {
    "packing": ({"packing": True}, {}, "Set packing=False"),
    "padding_free": ({"padding_free": True, "max_length": None}, {}, "Set padding_free=False"),
    "dft": ({"loss_type": "dft"}, {}, "Use loss_type='nll'"),
    "liger": ({"use_liger_kernel": True}, {}, "Set use_liger_kernel=False"),
    "by length": ({"train_sampling_strategy": "group_by_length"}, {}, "Leave it out"),
    "batch size": ({"auto_find_batch_size": True}, {}, "Set auto_find_batch_size=False"),
    "NEFTune": ({"neftune_noise_alpha": 5.0}, {}, "Leave neftune_noise_alpha out"),
    "smoothing": ({"label_smoothing_factor": 0.1}, {}, "Set label_smoothing_factor=0"),
    "compile": ({"torch_compile": True}, {}, "Set torch_compile=False"),
    "offloading": ({"activation_offloading": True}, {}, "Set activation_offloading=False"),
    "token": ({"hub_token": "hf_secret"}, {}, "Log in"),
    "another token": (
        {"model_init_kwargs": {"token": "hf_secret"}},
        {},
        "token is given, and training_args.bin",
    ),
    "debug": ({"debug": "underflow_overflow"}, {}, "prints what private rows activate"),
    "no norm": ({"max_grad_norm": None}, {}, "Set max_grad_norm=0"),
    "splits": ({}, {"train_dataset": DatasetDict(train=ROWS)}, "such as dataset['train']"),
    "no privacy": ({}, {"privacy": None}, "Give privacy=PrivacySpec(epsilon=8"),
    "a dict": ({}, {"privacy": {"epsilon": 8}}, "Give privacy=PrivacySpec(epsilon=8"),
    "a start that is not there": ({}, {"start": "strtA"}, "start='strtA' has no guarantee.json"),
    "a gate": ({}, {"callbacks": [LeakageCallback(GATED, fail_on="leaks>0")]}, "Leave fail_on out"),
    "a gate on public text": (
        {},
        {"callbacks": [Watching(GATED, fail_on="leaks>0")], "public_evaluation": True},
        "LeakageCallback(..., public=True)",
    ),
    "tokens seen": ({"include_num_input_tokens_seen": "all"}, {}, "Leave it out"),
    "loss function": ({}, {"compute_loss_func": lambda *_, **__: 0}, "Leave it out"),
    "collator": ({}, {"data_collator": lambda rows: rows}, "columns input_ids and labels"),
    "masked words": (
        {},
        {
            "data_collator": DataCollatorForLanguageModeling(
                tokenizer(), mlm_probability=0.2, mlm=False
            )
        },
        "writes over them",
    ),
    "evaluation": ({}, EVALUATED, "public_evaluation=True"),
    "best model": (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
        EVALUATED,
        "load_best_model_at_end chooses",
    ),
    "best saved": (
        {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps"},
        EVALUATED,
        "save_strategy chooses",
    ),
    "early stop": ({}, {"callbacks": [EarlyStoppingCallback(1)]}, "EarlyStoppingCallback stops"),
    "LoRA dropout": ({}, {"peft_config": lora(lora_dropout=0.05)}, "lora_dropout=0.0"),
    "attention dropout": ({}, {"model": small(attention_dropout=0.1)}, "attention_dropout = 0.1"),
    "GPT-2's dropout": (
        {},
        {
            "model": GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)),
            "peft_config": lora(target_modules=["c_attn"]),
        },
        "resid_pdrop = 0.1, embd_pdrop = 0.1, attn_pdrop = 0.1",
    ),
    "no column": ({}, {"user_column": "writer"}, "has no column 'writer'. It has: user, messages"),
    "which column": ({}, {"user_column": None}, "user_column='user'"),
    "two units": (
        {},
        {"privacy": PrivacySpec(noise_multiplier=1.0, unit="example")},
        "Leave user_column out",
    ),
    "streamed": (
        {},
        {"train_dataset": IterableDataset.from_generator(lambda: iter(several(chats())))},
        "how many rows",
    ),
    "no rows": ({}, {"train_dataset": ROWS.select([])}, "no rows"),
    "shuffled": ({"shuffle_dataset": True}, {}, "shuffle_dataset=False"),
    "an owner without a name": (
        {},
        {"train_dataset": Dataset.from_list([{**row, "user": ["a", ""]} for row in chats()])},
        "Row 0 has a user of type list, which names nobody",
    ),
    "nobody": (
        {},
        {"train_dataset": Dataset.from_list([{**row, "user": None} for row in chats()])},
        "Row 0 has no user",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_change(name, tmp_path):
    changes, given, words = REFUSED[name]
    with pytest.raises((GuaranteeError, UsageError), match=re.escape(words)) as refused:
        private_sft(tmp_path, given=given, **changes).train()
    assert "hf_secret" not in str(refused.value)
    assert not (tmp_path / "ledger.json").exists()


def test_what_the_environment_brings_is_refused_too(tmp_path, monkeypatch):
    trainer = private_sft(tmp_path)
    for owner, name, value, words in (
        (trainer, "is_deepspeed_enabled", True, "DeepSpeed adds up gradients"),
        (trainer, "is_distributed_loading_by_transformers", True, "Load it whole"),
        (trainer, "is_model_parallel", True, "spread over several devices"),
        (type(trainer.args), "n_gpu", 2, "CUDA_VISIBLE_DEVICES=0"),
        (type(trainer.accelerator), "parallelism_config", SimpleNamespace(tp_size=2), "tp_size=2"),
        (type(trainer.accelerator), "parallelism_config", SimpleNamespace(cp_size=2), "cp_size=2"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            with pytest.raises(GuaranteeError, match=words):
                trainer.train()
    monkeypatch.setattr(trainer.args, "deepspeed", {"zero_optimization": {"stage": 2}})
    with pytest.raises(GuaranteeError, match="Leave deepspeed out"):
        trainer.train()
    assert not (tmp_path / "ledger.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp_version": 1}, "Use FSDP2"),
        ({"state_dict_type": "StateDictType.SHARDED_STATE_DICT"}, "Use FULL_STATE_DICT"),
        ({"cpu_offload": CPUOffloadPolicy()}, "cpu_offload keeps shards"),
    ],
)
def test_only_whole_checkpoints_of_fsdp2_are_taken(tmp_path, monkeypatch, changes, words):
    trainer = private_sft(tmp_path)
    plugin = {
        "fsdp_version": 2, "state_dict_type": "StateDictType.FULL_STATE_DICT", "cpu_offload": OffloadPolicy(),
    }  # fmt: skip
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    given = SimpleNamespace(**plugin | changes)
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", given, raising=False)
    with pytest.raises(GuaranteeError, match=words):
        trainer.train()
    assert not (tmp_path / "ledger.json").exists()


def test_whatever_replaces_the_loss_or_the_step_is_refused(tmp_path):
    class OwnLoss(PrivateSFTTrainer):
        def compute_loss(self, *given, **rest):
            return super().compute_loss(*given, **rest)

    class OwnStep(PrivateSFTTrainer):
        def training_step(self, *given, **rest):
            return torch.zeros(())

    given = {
        "model": small(), "args": settings(tmp_path), "train_dataset": ROWS, "processing_class": tokenizer(),
        "peft_config": lora(), "privacy": PrivacySpec(noise_multiplier=1.0), "user_column": "user",
    }  # fmt: skip
    for kind, words in ((OwnLoss, "compute_loss is overridden"), (OwnStep, "training_step is")):
        with pytest.raises(GuaranteeError, match=words):
            kind(**given | {"model": small()})
    trainer = PrivateSFTTrainer(**given | {"model": small()})
    trainer.compute_loss = lambda *_, **__: 0
    with pytest.raises(GuaranteeError, match="compute_loss is overridden"):
        trainer.train()
    model = small()
    model.loss_function = lambda *_, **__: 0
    with pytest.raises(GuaranteeError, match=r"model\.loss_function was replaced"):
        PrivateSFTTrainer(**given | {"model": model})


def test_rows_without_anything_to_learn_are_refused_before_a_step_is_charged(tmp_path):
    with pytest.raises(UsageError, match=r"No row has a token to learn.* larger max_length"):
        private_sft(tmp_path, max_length=1).train()
    assert not (tmp_path / "ledger.json").exists()


def test_losses_over_the_batch_are_refused(tmp_path):
    config = MixtralConfig(
        vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.02,
    )  # fmt: skip
    with pytest.raises(
        GuaranteeError, match=r"router_aux_loss_coef=0\.0 in SFTConfig, or in the model's config"
    ):
        private_sft(tmp_path, given={"model": MixtralForCausalLM(config)})


def test_a_base_whose_outliers_are_chosen_over_the_batch_is_refused(tmp_path):
    small().save_pretrained(tmp_path / "base")
    for threshold in (6.0, 0.0):
        bits = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=bits)
        if threshold:
            with pytest.raises(GuaranteeError, match=r"llm_int8_threshold=0\.0"):
                private_sft(tmp_path, given={"model": base})
        else:
            private_sft(tmp_path, given={"model": base})


def private_plain(folder, **given):
    own = {
        "model": small(), "train_dataset": IDS, "privacy": PrivacySpec(noise_multiplier=1.0),
        "args": TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=1), "user_column": "user",
    }  # fmt: skip
    return PrivateTrainer(**own | given)


def test_rows_that_a_plain_trainer_would_read_otherwise_are_refused(tmp_path):
    def rows(**more):
        return [{**row, **more} for row in IDS]

    for dataset, words in (
        (rows(position_ids=[3, 4, 5, 6]), "position_ids"),
        (rows(attention_mask=[0, 1, 1, 1]), "attention_mask of row 0"),
        (rows(attention_mask=[1, 1, 1, 0]), "attention_mask of row 0"),
        (rows(labels=[5, 6]), "Row 0 has"),
        (rows(labels=[-1, 5, 6, 7]), "only -100"),
        (
            rows(input_ids=[0, 5, 6, 340]),
            "Row 0 has ids or labels that the model's vocabulary of 340",
        ),
        (
            rows(labels=[0, 5, 6, 4000]),
            "Row 0 has ids or labels that the model's vocabulary of 340",
        ),
        (Dataset.from_list(rows(input_ids=[0, 5, 6, 340])), "the model's vocabulary of 340"),
        ([{"input_ids": [1, 2], "user": "a"}], "Add the column"),
        ([{"text": "word", "user": "a"}], "no input_ids"),
    ):
        with pytest.raises(UsageError, match=words):
            private_plain(tmp_path, train_dataset=dataset).train()
    spec = PrivacySpec(noise_multiplier=1.0, expected_batch=100)
    with pytest.raises(
        UsageError, match="expected_batch=100, and by the trainer's arguments it is 8"
    ):
        private_plain(tmp_path, privacy=spec).train()
    shape = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=16)
    with pytest.raises(GuaranteeError, match="The model has dropout"):
        private_plain(tmp_path, model=GPT2LMHeadModel(shape))
    with pytest.raises(GuaranteeError, match="Every trial of a search spends"):
        private_plain(tmp_path).hyperparameter_search()
    for call in ("evaluate", "predict"):
        with pytest.raises(GuaranteeError, match="public_evaluation=True"):
            getattr(private_plain(tmp_path), call)(IDS)


def test_weights_that_the_ledger_does_not_know_are_not_gone_on_from(tmp_path):
    plain = Trainer(
        small(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1), train_dataset=IDS
    )  # fmt: skip
    plain.train()
    with pytest.raises(GuaranteeError, match=r"ledger\.json is missing"):
        private_plain(tmp_path).train(resume_from_checkpoint=True)
    private_plain(tmp_path / "private").train()
    with pytest.raises(GuaranteeError, match="is not a checkpoint of the run"):
        private_plain(tmp_path / "private").train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    with pytest.raises(GuaranteeError, match="or another output_dir, with a model"):
        private_plain(tmp_path / "private").train()
    with pytest.raises(UsageError, match="no checkpoint to go on from"):
        private_plain(tmp_path / "empty").train(resume_from_checkpoint=True)
