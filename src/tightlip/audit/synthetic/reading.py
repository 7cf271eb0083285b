"""Documents as numbers of words, held in a file that nobody else sees, and words back as text."""

from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from tightlip.audit.leakage.words import placed_words, words_of
from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.corpus.conversations import Conversation, TokenRow, called_with, contents_of
from tightlip.corpus.owners import owners_of
from tightlip.corpus.public_text import NOBODY, open_public
from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.corpus.tokens import TokenizedCorpus

UNKNOWN_WORD = 0  # the number of every word that the synthetic text does not have


def open_synthetic(source: Any, columns: dict[str, Any]) -> Corpus:
    """Generated text: a corpus, a file without users, or a list of texts."""
    if isinstance(source, str | Path):
        return open_public(Path(source), **columns)
    if isinstance(source, list | tuple) and all(isinstance(each, str) for each in source):
        source = [{columns["user_column"]: NOBODY, columns["text_column"]: text} for text in source]
    return open_corpus(source, **columns)


def texts_of(documents: Corpus) -> Iterator[tuple[str, str]]:
    """User and text of each document; of a chat, what is said in it."""
    if documents.format == "text":
        for batch in documents.batches():
            yield from zip(batch.users, batch.texts, strict=True)
        return
    for row in documents.raw_documents():
        if isinstance(row.document, TokenRow):
            raise UsageError(
                f"{documents.name} holds tokens, and nobody knows their text. Give the text that they were made from."
            )
        yield row.user, _said(row.document)


def _said(document: Any) -> str:
    if not isinstance(document, Conversation):
        return str(document.text)
    parts = ((*contents_of(each), *called_with(each)) for each in document.messages)
    return "\n".join(chain.from_iterable(parts))


def read_words(
    documents: Corpus, numbers: dict[str, int], work: Path, what: str
) -> TokenizedCorpus:
    """The documents as numbers of words; of those read first all join `numbers`.

    Holds:
        gone: the file has no name, so that nothing of it is left, however the process ends.
    """
    bounds, users = array("q", [0]), array("i")
    owners, owner_bounds, names = array("i"), array("q", [0]), dict[str, int]()
    is_first = not numbers
    with TemporaryFile(dir=work) as file, task(f"Reading the {what}", None) as bar:
        for user, text in texts_of(documents):
            words = words_of(text)
            for word in words if is_first else ():
                numbers.setdefault(word, len(numbers) + 1)
            file.write(array("i", [numbers.get(word, UNKNOWN_WORD) for word in words]))
            bounds.append(bounds[-1] + len(words))
            for name in owners_of(user):
                owners.append(names.setdefault(name, len(names)))
            users.append(owners[owner_bounds[-1]])
            owner_bounds.append(len(owners))
            bar.advance()
        file.flush()
        mapped = np.memmap(file, np.int32, "r", shape=(bounds[-1],)) if bounds[-1] else ()
    several = len(owners) > len(users)
    return TokenizedCorpus(
        tokens=np.asarray(mapped, np.int32),
        bounds=np.frombuffer(bounds, np.int64),
        users=np.frombuffer(users, np.int32),
        user_names=list(names),
        corpus_fingerprint=documents.fingerprint(),
        tokenizer_fingerprint="words",
        owners=np.frombuffer(owners, np.int32) if several else None,
        owner_bounds=np.frombuffer(owner_bounds, np.int64) if several else None,
    )


def cut_texts(
    documents: Corpus, corpus: TokenizedCorpus, starts: np.ndarray, lengths: np.ndarray
) -> list[str]:
    """The text of stretches of words, as it stands in the documents."""
    cut = [""] * len(starts)
    order = np.argsort(starts, kind="stable")
    own = np.searchsorted(corpus.bounds, starts[order], side="right") - 1
    done = 0
    for number, (_, text) in enumerate(texts_of(documents) if len(order) else ()):
        if done == len(order):
            break
        if own[done] != number:
            continue
        words = placed_words(text)
        while done < len(order) and own[done] == number:
            at = order[done]
            first = int(starts[at] - corpus.bounds[number])
            last = first + int(lengths[at]) - 1
            if last >= len(words.words):
                break
            cut[at] = text[words.starts[first] : words.ends[last]]
            done += 1
    if done < len(order):
        raise UsageError(
            f"{documents.name} changed while it was read. Give the command again once nothing writes to it."
        )
    return cut
