"""Sixteen words that no tokenizer cuts, for corpora made in tests."""

WORDS = [
    "ant",
    "bee",
    "cat",
    "dog",
    "eel",
    "fox",
    "gnu",
    "hen",
    "ibis",
    "jay",
    "kite",
    "lark",
    "mole",
    "newt",
    "owl",
    "pug",
]
