"""Public text to measure against: a corpus whose writers do not matter and may not be named."""

from collections.abc import Iterator
from pathlib import Path

from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files
from tightlip.corpus.formats import MAX_BATCH_BYTES, MAX_BATCH_ROWS, kind_of, rows_of
from tightlip.corpus.readers import BadRows, Corpus, DocumentBatch, open_corpus

NOBODY = ""


class TextColumn:
    """A file of texts without users, read like a corpus."""

    def __init__(self, path: Path, text_column: str, *, skips: bool) -> None:
        self.name, self.num_skipped = str(path), 0
        self._path, self._column, self._skips = path, text_column, skips

    def batches(self) -> Iterator[DocumentBatch]:
        self.num_skipped = num_documents = 0
        texts: list[str] = []
        for text in self._texts():
            texts.append(text)
            num_documents += 1
            if len(texts) == MAX_BATCH_ROWS or len(text) > MAX_BATCH_BYTES:
                yield DocumentBatch(users=[NOBODY] * len(texts), texts=texts)
                texts = []
        if texts:
            yield DocumentBatch(users=[NOBODY] * len(texts), texts=texts)
        if not num_documents:
            raise UsageError(f"{self.name} holds no documents. Give a file with at least one row.")

    def _texts(self) -> Iterator[str]:
        for number, row in rows_of(self._path):
            text = row.get(self._column) if isinstance(row, dict) else None
            if isinstance(text, str):
                yield text
            elif self._skips:
                self.num_skipped += 1
            else:
                raise UsageError(
                    f"{self.name}, row {number} has no text in column {self._column!r}. Mend it, or skip and count such "
                    "rows: --bad-rows skip"
                )

    def fingerprint(self) -> str:
        return digest_of_files([self._path])


def open_public(
    path: Path, *, user_column: str, text_column: str, bad_rows: BadRows
) -> Corpus | TextColumn:
    """The public corpus at `path`, its text in the private corpus' column or in `text`.

    A file without users is read by its text column alone.
    """
    if path.is_file() and kind_of(path) is not None and path.stat().st_size:
        _, first = next(rows_of(path), (0, {}))
        if isinstance(first, dict) and user_column not in first:
            found = [name for name in (text_column, "text") if name in first]
            if not found:
                raise UsageError(
                    f"{path} has no column {text_column!r} and none named text. Columns there: {', '.join(first)}. Rename "
                    "the one that holds the text."
                )
            return TextColumn(path, found[0], skips=bad_rows == "skip")
    return open_corpus(path, user_column=user_column, text_column=text_column, bad_rows=bad_rows)
