"""Sizes of memory as people write them."""

import re

from tightlip.core.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def bytes_from(text: str) -> int:
    """Bytes meant by '4GB', '512 MB' or '2000000000'.

    >>> bytes_from("4GB")
    4000000000
    >>> bytes_from("1.5 GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise UsageError(f"memory={text!r} is not a size. Write it like 4GB or 512MB.")
    number, unit, binary = match.groups()
    scale = _UNITS[unit.upper()]
    if binary:
        scale = 1024 ** "KMGT".index(unit.upper()) * 1024 if unit else 1
    return int(float(number) * scale)
