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
