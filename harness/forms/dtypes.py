"""Dtypes by torch's names: their sizes, and which one a precision computes in."""

from __future__ import annotations

from harness.backends.base import Precision

DTYPE_BYTES = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2,
    "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "none": 0,
}  # fmt: skip
"""Per element; 'none' is the dtype of a barrier."""
COMPUTE: dict[Precision, str] = {
    "fp32": "float32", "bf16-mixed": "bfloat16", "fp16-mixed": "float16", "bf16": "bfloat16",
}  # fmt: skip
"""Dtype of matrix products at each precision."""
