"""Names of collectives: torch's dispatcher operators, NCCL's launches, dtypes as torch writes them."""

from __future__ import annotations

import re
from functools import lru_cache

from harness.forms.terms import OPERATIONS

# Operator -> (collective, index of the argument that holds the complete tensor; this rank's piece of it for
# gather and scatter).
OPERATORS: dict[str, tuple[str, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", 0),
    "monitored_barrier_": ("barrier", 0),
}
"""Of `torch.ops.c10d`."""
INPUT_AT = {"_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": 1, "alltoall_base_": 1}
"""Index of the argument with this rank's input, where it tells the group's size or the payload."""
_WORDS = (
    ("all_gather", "all_?gather"),
    ("reduce_scatter", "reduce_?scatter"),
    ("barrier", "barrier"),
    ("all_reduce", "all_?reduce"),
    ("all_to_all", "all_?to_?all"),
    ("broadcast", "broadcast"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
)
"""Names of collectives within names of launches, the longer ones first."""
_NO_COLLECTIVE = re.compile(r"wait|coalescing|init|finali|group(?:start|end)|^coalesced$", re.IGNORECASE)
DTYPES = {
    "float": "float32", "float32": "float32", "double": "float64", "float64": "float64", "half": "float16",
    "float16": "float16", "bfloat16": "bfloat16", "int": "int32", "int32": "int32", "long": "int64",
    "long int": "int64", "long long": "int64", "int64": "int64", "short": "int16", "int16": "int16",
    "short int": "int16", "char": "int8", "signed char": "int8", "int8": "int8", "byte": "uint8",
    "unsigned char": "uint8", "uint8": "uint8", "bool": "bool",
}  # fmt: skip


@lru_cache(maxsize=4096)
def collective_of(name: str) -> str | None:
    """The collective that the name of a launch or operator says; None: it says none.

    'nccl:_all_gather_base', 'allreduce_coalesced' and 'c10d::alltoall_base_' are in; names of kernels do not
    tell and must not be given.
    """
    scope, _, bare = name.rpartition(":")
    if bare in OPERATORS and scope.startswith("c10d"):
        return OPERATORS[bare][0]
    if _NO_COLLECTIVE.search(bare):
        return None
    plain = bare.lower().replace("multimem_", "").replace("one_shot_", "").replace("two_shot_", "")
    return next((op for op, word in _WORDS if op in OPERATIONS and re.search(word, plain)), None)


@lru_cache(maxsize=1024)
def dtype_of(text: str) -> str | None:
    """A dtype by torch's name, from NCCL's arguments ('Float') or shapes ('c10::BFloat16'); None: unknown."""
    bare = text.strip().rpartition("::")[2].lower()
    return bare if bare.startswith("float8") else DTYPES.get(bare)


def element_bytes(dtype: str) -> int | None:
    """Bytes of an element of a dtype by torch's name."""
    from harness.forms.dtypes import DTYPE_BYTES

    return 1 if dtype.startswith("float8") else DTYPE_BYTES.get(dtype)
