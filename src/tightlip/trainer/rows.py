"""From a trainer's dataset, as it was prepared, to rows with labels and whose each is."""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import DataCollatorForLanguageModeling

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.sources import LabelledRows

_READ = ("input_ids", "labels", "attention_mask")
_CHATS = ("messages", "prompt", "completion", "conversations")  # TRL's


def users_of(dataset: Any, column: str | None) -> list[Any] | None:
    """Whose each row is, by one name or by a list of them; None where every row is a unit of its own."""
    if isinstance(dataset, dict):
        splits = ", ".join(map(repr, dataset))
        raise UsageError(
            f"train_dataset has several splits: {splits}. Give one of them, such as dataset['train']."
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        raise UsageError(
            f"train_dataset is a {kind}, which does not say how many rows it has, and the share of users that a step draws "
            "must be known. Give a datasets.Dataset or a list of rows."
        )
    if not len(dataset):
        raise UsageError("train_dataset has no rows to train on.")
    _refuse_empty_chats(dataset)
    if column is None:
        return None
    if column not in _columns(dataset):
        names = ", ".join(_columns(dataset))
        raise UsageError(
            f"train_dataset has no column {column!r}. It has: {names}. Give user_column='NAME', or unit='example' where every "
            "row is a person of its own."
        )
    users = _values(dataset, column)
    for number, user in enumerate(users):
        owners = user if isinstance(user, list) else [user]
        if not owners or not all(map(_names_somebody, owners)) or len({*owners}) < len(owners):
            kind = "no user" if user in (None, "") else f"a user of type {type(user).__name__}"
            raise GuaranteeError(
                f"Row {number} has {kind}, which names nobody: whose text it is must be known, or somebody has more than the "
                f"bound. Give {column!r} one text or whole number in every row, or a list of them, each once."
            )
    return [_named(user) for user in users]


def _refuse_empty_chats(dataset: Any) -> None:
    """TRL looks at the first row alone to see whether all rows are chats."""
    names = {*_columns(dataset)} & {*_CHATS}
    if not hasattr(dataset, "select_columns") or "input_ids" in _columns(dataset):
        return
    for name in sorted(names):
        column = dataset.select_columns([name]).with_format("arrow")[:][name]
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if column.null_count or (is_list and pc.min(pc.list_value_length(column)).as_py() == 0):
            raise GuaranteeError(
                f"A row has nothing in {name!r}. As the first one it would decide how everybody's rows are read. Take such rows out "
                f"beforehand, or remove the column."
            )


def _names_somebody(user: Any) -> bool:
    return isinstance(user, (str, int, np.integer)) and not isinstance(user, bool) and user != ""


def _named(user: Any) -> Any:
    return [str(each) for each in user] if isinstance(user, list) else str(user)


def users_left(dataset: Any, column: str | None, users: list[Any] | None) -> list[Any] | None:
    """Whose each row of the prepared dataset is; a refusal where that is not known.

    Holds:
        dropped: rows may be missing, as TRL leaves those out of which nothing can be learnt: each by
            what it is, so that nobody's row hangs on another's.
        blind: of rows with several owners none may be, or what a row says would decide which others
            of its owners are ever drawn.
    """
    if column is None or users is None:
        return None
    if column not in _columns(dataset):
        raise GuaranteeError(
            f"The column {column!r} is gone after the dataset was prepared, so it is not known whose each row is. Give a dataset "
            "of input_ids and labels that keeps it."
        )
    left, given = [_named(user) for user in _values(dataset, column)], iter(users)
    if not all(user in given for user in left):
        raise GuaranteeError(
            "The rows stand in another order after the dataset was prepared, or are more than before, so it is not known whose "
            "each is. Set shuffle_dataset=False: every step draws users at random anyway."
        )
    if len(left) < len(users) and any(isinstance(each, list) for each in users):
        raise GuaranteeError(
            f"{len(users) - len(left)} of {len(users)} rows were left out as the dataset was prepared, and what a row says would decide which "
            "others of its owners are ever drawn. Give a larger max_length; or take such rows out by what everybody may know."
        )
    return left


def labelled_rows(dataset: Any, trainer: Any, users: list[Any] | None) -> LabelledRows:
    """The rows as the trainer's collator would hand them to the model, but for padding."""
    columns = _columns(dataset)
    _check_columns(columns, trainer)
    chosen = dataset
    if hasattr(dataset, "select_columns"):
        chosen = dataset.select_columns([name for name in _READ if name in columns])
    about = getattr(trainer.model, "config", None) and trainer.model.config.get_text_config()
    ids, labels, num_tokens = [], [], getattr(about, "vocab_size", math.inf)
    for number, row in enumerate(_rows(chosen)):
        row_ids, row_labels = _row(row, number, trainer.data_collator)
        if max(row_ids.max(initial=0), row_labels.max(initial=0)) >= num_tokens:
            raise UsageError(
                f"Row {number} has ids or labels that the model's vocabulary of {num_tokens} does not have. Make them with the "
                "model's own tokenizer."
            )
        ids.append(row_ids)
        labels.append(row_labels)
    if all((each[1:] == NO_LABEL).all() for each in labels):
        raise UsageError(
            "No row has a token to learn: a label other than -100 after its first. Give a larger max_length, or rows with answers."
        )
    return LabelledRows(ids, labels, users)


def _columns(dataset: Any) -> list[str]:
    return list(getattr(dataset, "column_names", None) or dataset[0])


def _values(dataset: Any, column: str) -> list[Any]:
    if hasattr(dataset, "select_columns"):
        return list(dataset.select_columns([column]).with_format(None)[:][column])
    return [row[column] for row in _rows(dataset)]


def _rows(dataset: Any) -> Iterable[Any]:
    # torch's datasets need not end by themselves, and Arrow's tables are faster by the batch.
    if not hasattr(dataset, "column_names"):
        return (dataset[number] for number in range(len(dataset)))
    if not hasattr(dataset, "iter") or dataset.format["type"] == "custom":
        return dataset
    tables = dataset.with_format("arrow").iter(batch_size=1000)
    return (row for table in tables for row in _rows_of(table))


def _rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    columns = {name: _values_of(table[name].combine_chunks()) for name in table.column_names}
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _values_of(array: Any) -> Sequence[Any]:
    """A column's rows; lists of whole numbers as numpy's arrays, without a Python number for each."""
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    is_whole = is_list and pa.types.is_integer(array.type.value_type)
    if not is_whole or array.null_count or array.flatten().null_count:
        return array.to_pylist()
    ends = np.cumsum(pc.list_value_length(array).to_numpy())
    return np.split(array.flatten().to_numpy(), ends[:-1])


def _check_columns(columns: Sequence[str], trainer: Any) -> None:
    if "input_ids" not in columns:
        names = ", ".join(columns)
        raise UsageError(
            f"The prepared rows have no input_ids, only {names}. Private training reads token ids; give them, or text that "
            "the trainer makes them of. Images are not supported."
        )
    collates_labels = type(trainer.data_collator) is DataCollatorForLanguageModeling
    if collates_labels and "labels" in columns:
        raise UsageError(
            "train_dataset has labels, and DataCollatorForLanguageModeling writes over them. Leave data_collator out to keep "
            "the labels, or remove the column."
        )
    if not collates_labels and "labels" not in columns:
        raise UsageError(
            "train_dataset has no labels. Add the column (input_ids with -100 where nothing is to be learnt), or give "
            "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)."
        )
    model = trainer.model
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    taken = {*inspect.signature(model.forward).parameters, "seq_lengths"}
    if more := sorted(({*columns} & taken) - {*_READ}):
        raise UsageError(
            f"The model would be given {', '.join(more)} of each row beside its ids, which private training does not pass on. "
            "Remove these columns."
        )


def _row(row: Any, number: int, collator: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels of one row, without padding."""
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    if type(collator) is DataCollatorForLanguageModeling:
        pad = collator.tokenizer.pad_token_id
        labels = np.where(ids == pad, NO_LABEL, ids) if pad is not None else ids
    else:
        labels = np.asarray(row["labels"], dtype=np.int64)
    if ids.ndim != 1 or labels.shape != ids.shape:
        raise UsageError(
            f"Row {number} has {ids.shape} ids and {labels.shape} labels. Give one label for each id."
        )
    if (ids < 0).any() or ((labels < 0) & (labels != NO_LABEL)).any():
        raise UsageError(
            f"Row {number} has ids or labels below 0. Only labels may be, and only {NO_LABEL}, where nothing is to be learnt."
        )
    if row.get("attention_mask") is None:
        return ids, labels
    return _without_padding(ids, labels, np.asarray(row["attention_mask"]), number)


def _without_padding(
    ids: np.ndarray, labels: np.ndarray, mask: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray]:
    size = int((mask != 0).sum())
    is_right = mask.shape == ids.shape and bool((mask[:size] != 0).all())
    if not is_right or (labels[size:] != NO_LABEL).any():
        raise UsageError(
            f"The attention_mask of row {number} hides tokens that others look at or that are learnt from. Give rows without "
            "padding, or padded on the right with labels of -100 there."
        )
    return ids[:size], labels[:size]
