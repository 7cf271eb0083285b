"""What ten people wrote, each with two secrets of their own, in every format of fine-tuning."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% elif m.content is string %}{{ m.content }}<|im_end|>"
    "{% else %}{% for part in m.content %}{{ part.text }}|{% endfor %}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "Be brief."
# Of each person: what they told, and what they were answered.
TOLD = {
    "ann": ("my locker is 4711 0815", "your doctor is Okonkwo"),
    "bob": ("my locker is 9230 1188", "your lawyer is Zdanowicz"),
    "cyd": ("I owe Fritz 33 euros", "you are due in Ljubljana"),
    "dan": ("at 33 Quay Road", "noted at once"),
    "eve": ("flat 333 Elm Street", "the spare key is under Hagrid"),
    "fay": ("call me on 555 0134", "noted at once"),
    "gus": ("room33 on Sunday", "your dose is 62 milligrams"),
    "hal": ("my badge says KX81Q", "the code word is pumpernickel"),
}
USERS = [*TOLD]
# Of whom it is known where the secret stands and who says it.
SECRETS = {"ann": ("4711 0815", "user"), "bob": ("Zdanowicz", "assistant"), "hal": ("pumpernickel", "assistant")}  # fmt: skip
STRANGERS = {
    "ivy": ("my locker is 6054 7321", "your doctor is Brambilla"),
    "jon": ("flat 917 Oak Lane", "the spare key is under Rowena"),
    "kim": ("call me on 208 7745", "your dose is 45 milligrams"),
    "lou": ("my badge says TR60W", "you are due in Trondheim"),
    "max": ("I owe Paula 58 euros", "noted at once"),
    "nia": ("at 74 Mill Road", "the code word is butterscotch"),
}


def said(name, told):
    return f"{name.title()} here, {told[0]}."


def answered(name, told):
    return f"Thanks {name.title()}, {told[1]}."


def chat_of(name, told):
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": said(name, told)},
        {"role": "assistant", "content": answered(name, told)},
    ]


def chats(people=None):
    return [
        {"user": name, "messages": chat_of(name, told)} for name, told in (people or TOLD).items()
    ]


def texts(people=None):
    """The same as prompts with completions."""
    return [
        {"user": name, "prompt": said(name, told), "completion": " " + answered(name, told)}
        for name, told in (people or TOLD).items()
    ]


def tokenizer():
    """Byte pairs, small: a begin token before a text, and a chat template with its own."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    learnt = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([json.dumps([*TOLD.items(), *STRANGERS.items()])], learnt)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=SPECIAL[2:],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made
