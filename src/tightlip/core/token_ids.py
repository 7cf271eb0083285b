"""Which numbers a token may have."""

from typing import Any

from tightlip.core.errors import UsageError

MAX_TOKEN_ID = 2**24  # the largest vocabularies have some 300,000 tokens


def check_token_ids(place: str, tokenizer: Any) -> None:
    """Refuse ids that tables of all tokens would have to reach up to."""
    ids = tokenizer.get_vocab().values()
    odd = next((number for number in ids if not 0 <= number <= MAX_TOKEN_ID), None)
    if odd is not None:
        raise UsageError(
            f"{place} has {len(ids):,} tokens, one of them with the id {odd}. Ids lie between 0 and {MAX_TOKEN_ID:,}: "
            "fetch or save the tokenizer again."
        )


def begin_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text, found by encoding one.

    Attributes do not tell: a reloaded tokenizer may say that it adds no begin token, and add it.
    """
    for text in ("a", *tokenizer.convert_ids_to_tokens([*range(min(len(tokenizer), 64))])):
        bare, whole = (
            list(tokenizer([text], truncation=False, verbose=False, **how)["input_ids"][0])
            for how in ({"add_special_tokens": False}, {})
        )
        places = [n for n in range(len(whole)) if whole[n : n + len(bare)] == bare]
        if places and bare and not {*bare} & {*tokenizer.all_special_ids}:
            return whole[: places[0]]
    return []
