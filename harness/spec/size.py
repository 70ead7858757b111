"""Sizes in bytes as people write them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError, WithJsonSchema

_SIZE = TypeAdapter(ByteSize)


def read_bytes(value: Any) -> int:
    """The bytes that a number or a text such as '2GB' (10^9) or '2GiB' (2^30) means. Raises ValueError."""
    try:
        size = int(_SIZE.validate_python(value))
    except ValidationError:
        size = 0
    if size < 1:
        raise ValueError("give bytes, or a size such as 2GB (10^9 bytes each) or 2GiB (2^30)")
    return size


Bytes = Annotated[
    int,
    BeforeValidator(read_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
"""A setting in bytes."""
