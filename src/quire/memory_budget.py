"""A budget of memory as users write it: bytes (`4294967296`), a size (`4GiB`, `1.5GB`, `512Mi`) or a share (`50%`)."""

import re
from typing import Any

from quire.field_error import FieldError

UNITS = {prefix: 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))} | {
    f"{prefix}i": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)
}
"""Bytes of a unit, in lower case and without the B."""
MAX_BYTES = 1 << 50
FORMS = "bytes such as 4294967296, a size such as 4GiB, 512MiB or 1.5GB, or a share of the free memory such as 50%"


def budget_bytes(value: Any, free: int, *, field: str = "memory_budget") -> int:
    """Return the bytes of a budget, of which a share is one of the `free` bytes. FieldError if it is not one."""
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?(%|[kmgt]?i?b?)", str(value).strip().lower())
    is_number = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
    unit = None if match is None else match[2].removesuffix("b")
    if not is_number or match is None or (unit not in UNITS and unit != "%"):
        raise FieldError(f"{field}={value!r} must be {FORMS}", field=field)
    if unit == "%":
        share = float(match[1])
        if not 0 < share <= 100:
            raise FieldError(f"{field}={value!r} must be above 0% and at most 100%", field=field)
        return int(free * share / 100)
    whole = match[1].isdigit()
    num_bytes = (int(match[1]) if whole else float(match[1])) * UNITS[unit or ""]
    if not 1 <= num_bytes <= MAX_BYTES:
        raise FieldError(f"{field}={value!r} must be from 1 byte to {MAX_BYTES:,} bytes", field=field)
    return int(num_bytes)
