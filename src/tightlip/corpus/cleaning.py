"""Scrubbing and removal of duplicates, batch by batch, with counts of everything done."""

from collections import Counter

from tightlip.corpus.deduplicate import DuplicateDocuments, DuplicateSentences
from tightlip.corpus.readers import DocumentBatch
from tightlip.corpus.scrub import presidio_names, scrub


class Cleaner:
    """Cleans batches in corpus order. Duplicates are counted even where they stay.

    Scrubbing comes first: two texts that differ in a phone number alone are the same text.
    """

    def __init__(
        self, *, deduplicate: str = "none", scrub: bool = False, names: bool = False
    ) -> None:
        self._deduplicate, self._scrub = deduplicate, scrub
        self._names = presidio_names() if names else None
        self.sentences, self.documents = DuplicateSentences(), DuplicateDocuments()
        self.documents_per_user: Counter[str] = Counter()
        self.scrubbed: Counter[str] = Counter()
        self.num_read = self.num_removed = self.num_emptied = 0

    def clean(self, batch: DocumentBatch) -> DocumentBatch:
        """The batch without what is to go; whole documents may be missing."""
        self.num_read += len(batch)
        texts = [self._cleaned(text) for text in batch.texts]
        kept = [text is not None for text in texts]
        rest = chosen(batch, kept)
        self.documents_per_user.update(rest.users)
        return DocumentBatch(
            users=rest.users,
            texts=[text for text in texts if text is not None],
            attributes=rest.attributes,
        )

    def removed(self) -> dict[str, int]:
        """How many documents and sentences went."""
        sentences = self.sentences.num_duplicates if self._deduplicate == "sentences" else 0
        return {
            "documents": self.num_removed + self.num_emptied,
            "sentences": sentences,
            "emptied_documents": self.num_emptied,
        }

    def _cleaned(self, text: str) -> str | None:
        if self._scrub:
            text, counts = scrub(text, names=self._names)
            self.scrubbed.update(counts)
        is_duplicate = self.documents.is_duplicate(text)
        rest = self.sentences.without(text)
        if self._deduplicate == "documents":
            self.num_removed += is_duplicate
            return None if is_duplicate else text
        if self._deduplicate == "none":
            return text
        emptied = bool(text.strip()) and not rest.strip()
        self.num_emptied += emptied
        return None if emptied else rest


def chosen(batch: DocumentBatch, keep: list[bool]) -> DocumentBatch:
    """The documents of a batch where `keep` is true."""

    def pick(values: list) -> list:
        return [value for value, kept in zip(values, keep, strict=True) if kept]

    return DocumentBatch(
        users=pick(batch.users),
        texts=pick(batch.texts),
        attributes={name: pick(values) for name, values in batch.attributes.items()},
    )
