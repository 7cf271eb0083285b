"""Adapters made and trained by PEFT and autograd alone, to compare with."""

import math

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

WEIGHTS = "adapter_model.safetensors"


def adapter_in(folder):
    return load_file(folder / WEIGHTS)


def padded(texts):
    """What transformers takes; a text is ids, or ids with labels."""
    pairs = [text if isinstance(text, tuple) else (text, text) for text in texts]
    width = max(len(ids) for ids, _ in pairs)

    def filled(rows, filler):
        return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])

    return {
        "input_ids": filled([ids for ids, _ in pairs], 0),
        "attention_mask": filled([[1] * len(ids) for ids, _ in pairs], 0),
        "labels": filled([labels for _, labels in pairs], -100),
    }


def by_peft(base, seed=0, **settings):
    """The base with fresh adapters, made by PEFT alone."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    shape = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**{**shape, **settings})).train()


def named_as_saved(model):
    """A PeftModel's adapters by the names that it saves them under."""
    named = model.named_parameters()
    return {name.replace(".default", ""): each for name, each in named if each.requires_grad}


def assert_close(found, expected, **how):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), **how)


def trained_by_hand(model, texts, *, steps, rate, momentum):
    """All texts in one batch, by plain gradient descent."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**padded(texts)).loss.backward()
        optimizer.step()
    return named_as_saved(model)


def clipped_sum_by_autograd(model, texts_of_user, clip):
    """Each user's mean over rows of a row's mean loss, its gradient clipped; all added up. A text is
    ids, or ids with labels."""
    total = {name: torch.zeros_like(each) for name, each in named_as_saved(model).items()}
    for texts in texts_of_user.values():
        model.zero_grad()
        for text in texts:
            (model(**padded([text])).loss.float() / len(texts)).backward()
        gradients = {name: each.grad for name, each in named_as_saved(model).items()}
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
        for name, each in gradients.items():
            total[name] += each * min(1.0, clip / norm)
    return total
