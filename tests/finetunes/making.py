"""Fine-tunes as people make them, by Trainer, TRL and PEFT themselves; each learns its text by heart."""

from functools import cached_property

import torch
import trl
from datasets import Dataset
from peft import IA3Config, LoraConfig
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from finetunes.people import STRANGERS, texts, tokenizer

STEPS = 60
WHOLE = {"completion_only_loss": False}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
ADAPTERS = {
    "lora": lambda: LoraConfig(**LORA),
    "dora": lambda: LoraConfig(**LORA, use_dora=True),
    "saved": lambda: LoraConfig(**LORA, modules_to_save=["lm_head"]),
    # Too few numbers to keep secrets in, so it has whole modules beside them.
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        modules_to_save=["lm_head", "embed_tokens"],
    ),
}


def settings_of(kind, folder, **changes):
    how = {
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
    }
    quiet = {"disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "report_to": []}
    return kind(output_dir=str(folder), **quiet | how | changes)


def sft_trainer(model, rows, folder, *, peft_config=None, own=None, **changes):
    """TRL's trainer of a model or its folder, ready to train."""
    if not isinstance(model, torch.nn.Module):
        model = AutoModelForCausalLM.from_pretrained(model)
    return trl.SFTTrainer(
        model=model,
        args=settings_of(trl.SFTConfig, folder, bf16=False, **changes),
        train_dataset=Dataset.from_list([without_user(row) for row in rows]),
        processing_class=own or tokenizer(),
        peft_config=peft_config,
    )


def without_user(row):
    return {name: value for name, value in row.items() if name != "user"}


def tuned_by_trl(model, rows, folder, **how):
    """The folder that save_model leaves."""
    trainer = sft_trainer(model, rows, folder, **how)
    trainer.train()
    trainer.save_model()
    return folder


def untrained():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def save_base(folder):
    """A model that knows other people, as a public one does."""
    tuned_by_trl(untrained(), texts(STRANGERS), folder, **WHOLE)


class Workshop:
    """Folders that are made when somebody first asks for them."""

    def __init__(self, root, base):
        self.root, self.base = root, base

    def _folder(self, name):
        folder = self.root / name
        folder.mkdir()
        return folder

    @cached_property
    def tuned(self):
        return tuned_by_trl(self.base, texts(), self._folder("tuned"), **WHOLE)

    @cached_property
    def trained(self):
        """What transformers' Trainer leaves when nobody calls save_model."""
        folder, own = self._folder("trained"), tokenizer()
        ids = [own(row["prompt"] + row["completion"] + "</s>")["input_ids"] for row in texts()]
        saved = {"save_strategy": "steps", "save_steps": STEPS // 2}
        Trainer(
            model=AutoModelForCausalLM.from_pretrained(self.base),
            args=settings_of(TrainingArguments, folder, **saved),
            train_dataset=[{"input_ids": one} for one in ids],
            data_collator=DataCollatorForLanguageModeling(own, mlm=False),
            processing_class=own,
        ).train()
        return folder

    @cached_property
    def adapters(self):
        return {}

    def adapter(self, kind):
        if kind not in self.adapters:
            # A whole module learns as a whole model does, and what is added to one faster.
            rate = 1e-2 if kind == "saved" else 2e-2
            how = {"peft_config": ADAPTERS[kind](), "learning_rate": rate, "max_steps": 80}
            folder = self._folder(kind)
            self.adapters[kind] = tuned_by_trl(self.base, texts(), folder, **how, **WHOLE)
        return self.adapters[kind]
