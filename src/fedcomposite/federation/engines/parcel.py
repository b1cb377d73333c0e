"""A message's content as bytes, and back: texts and numbers as JSON in front, blocks of bytes behind, copied once.

Flower's own encoding copies a vector several times and is decoded by a parser that knows far more than is needed here.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import ConfigRecord, RecordDict

_FRONT = 64 << 20  # bytes of texts and numbers, at most


def pack(content: RecordDict) -> bytes:
    """The bytes of a message's content."""
    return b"".join(parts(content))


def parts(content: RecordDict) -> list[bytes]:
    """Its bytes in pieces, without a copy of the large ones."""
    front: list[Any] = []
    blocks: list[bytes] = []
    for name, record in content.items():
        if not isinstance(record, ConfigRecord):
            raise ValueError(f"a message of this package holds texts, numbers and bytes, not {type(record).__name__}")
        large = {k: v for k, v in record.items() if isinstance(v, bytes)}
        front.append([name, {k: v for k, v in record.items() if k not in large}, {k: len(v) for k, v in large.items()}])
        blocks += large.values()
    head = json.dumps(front).encode()
    return [len(head).to_bytes(8, "big"), head, *blocks]


def unpack(payload: bytes) -> RecordDict:
    """The content in some bytes; a ``ValueError`` if it is none."""
    size = int.from_bytes(payload[:8], "big")
    if len(payload) < 8 or size > min(_FRONT, len(payload) - 8):
        raise ValueError("not a message")
    at = 8 + size
    found: dict[str, Any] = {}
    try:
        for name, plain, large in json.loads(payload[8:at]):
            blocks = {}
            for key, length in large.items():
                if type(length) is not int or not 0 <= length <= len(payload) - at:
                    raise ValueError("not a message")
                blocks[key] = payload[at : at + length]
                at += length
            found[name] = ConfigRecord({**plain, **blocks})
        if at != len(payload):
            raise ValueError("not a message")
        return RecordDict(found)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message ({type(error).__name__})") from None
