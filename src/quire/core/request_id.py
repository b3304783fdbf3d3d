"""Ids of requests: a client's request may be several requests of the engine, whose ids begin with the client's."""

import re
import uuid

_PART = re.compile(r"(.+)-\d+-[0-9a-f]{8}", re.DOTALL)


def part_id(client_id: str, index: int) -> str:
    """Return a new id for one part of a client's request."""
    return f"{client_id}-{index}-{uuid.uuid4().hex[:8]}"


def client_id(request_id: str) -> str:
    """Return the id of the client's request that a request is a part of, or its own id if it is not a part."""
    found = _PART.fullmatch(request_id)
    return found[1] if found else request_id
