"""Texts whose label and writer are spelt out in single words, and tiny encoders to read them."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

LABEL_WORDS = {
    "sport": ["goal", "match", "coach", "league"],
    "money": ["bank", "stock", "loan", "bond"],
}
WRITER_WORDS = {
    "old": ["hither", "yonder", "alas", "quoth"],
    "young": ["cool", "dude", "yeah", "lol"],
}
FILLERS = [f"word{number}" for number in range(30)]


def toy_corpus(num_texts=400, *, seed=0, num_fillers=4):
    """Rows of user, text, topic and age; topic and age are independent of each other."""
    draw = random.Random(seed)
    rows = []
    for number in range(num_texts):
        topic, age = draw.choice(sorted(LABEL_WORDS)), draw.choice(sorted(WRITER_WORDS))
        words = [draw.choice(LABEL_WORDS[topic]), draw.choice(WRITER_WORDS[age])]
        words += draw.sample(FILLERS, num_fillers)
        draw.shuffle(words)
        # A number of its own keeps any two texts apart.
        rows.append(
            {
                "user": f"u{number % 40}",
                "text": " ".join([*words, f"n{number}"]),
                "topic": topic,
                "age": age,
            }
        )
    return rows


def tiny_encoder(folder, kind, *, seed=0, with_pooler=True):
    """A random BERT or RoBERTa of two small layers with a word tokenizer, saved in `folder`."""
    words = [
        w for group in (LABEL_WORDS, WRITER_WORDS) for v in group.values() for w in v
    ] + FILLERS
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    if kind == "bert":
        special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    start, pad, end, unknown, mask = special
    vocabulary = {word: place for place, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token=start, pad_token=pad, sep_token=end,
        unk_token=unknown, mask_token=mask, model_max_length=64,
    )  # fmt: skip
    shape = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "pad_token_id": 1,
    }
    torch.manual_seed(seed)
    if kind == "bert":
        model = BertModel(
            BertConfig(max_position_embeddings=20, **shape), add_pooling_layer=with_pooler
        )
    else:
        model = RobertaModel(
            RobertaConfig(max_position_embeddings=22, **shape), add_pooling_layer=with_pooler
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
