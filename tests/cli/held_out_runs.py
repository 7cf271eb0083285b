"""Runs with held-out text, made in a second: `parrot` knows its training text, `stranger` nothing."""

import random

import torch

from animals import WORDS
from tightlip.core.run_folder import begin_run, write_ledger
from tightlip.corpus.canaries import Canary, Planted, write_canary_key
from tightlip.corpus.opening import fingerprints
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.models.loading import load_tokenizer

LEDGER = {"mechanism": "test", "epsilon": None, "delta": None, "standing": "measured only"}


def documents(num_users=12, seed=0):
    """User n writes 5 + n documents of eight random words, and says which team they are in."""
    draw = random.Random(seed)
    return [
        {
            "user": f"user {user:02d}",
            "text": " ".join(draw.choices(WORDS, k=8)),
            "team": "red" if user % 2 else "blue",
        }
        for user in range(num_users)
        for _ in range(5 + user)
    ]


def prepared(folder, rows, **settings):
    """A corpus in the words of WORDS. Numbered by how often training has them, as in a vocabulary
    built here, sixteen equally frequent words would tell a little of what was trained on."""
    given = folder.parent / "all-words"
    if not given.exists():
        build_tokenizer(open_corpus([("a", " ".join(WORDS))])).save_pretrained(given)
    return prepare(rows, folder, PrepareConfig(**{"tokenizer": str(given), **settings}))


def learn(model, corpus: PreparedCorpus, bos, steps):
    ids = [[bos, *corpus.train.document(n).tolist()] for n in range(corpus.train.num_documents)]
    rows = torch.tensor([row for row in ids if len(row) == 9])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()


def make_run(folder, corpus: PreparedCorpus, *, steps, ledger=LEDGER):
    """A finished run on `corpus`."""
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 32, 64, 1))
    learn(model, corpus, tokenizer.bos_token_id, steps)
    recorded = {"folder": str(corpus.folder), "num_users_left_out": 0, **fingerprints(corpus)}
    begin_run(folder, {"corpus": recorded})
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_ledger(folder, ledger)
    return folder


def planted(path, texts):
    """A key that names these texts as planted."""
    canaries = [
        Canary(
            text=text,
            user="user 00",
            repetitions=3,
            template="My ID is {digits:4}",
            values=tuple(text[-4:]),
        )
        for text in texts
    ]
    write_canary_key(path, Planted(canaries=canaries, pools={"digits": list("0123456789")}))
