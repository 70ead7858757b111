"""What DeepSpeed imports and tries out late: half a second of each rank's start, done once instead.

A fork server imports this module before it forks ranks that will use DeepSpeed.
"""

from contextlib import suppress
from importlib import import_module

import deepspeed
import deepspeed.ops

LATE = (
    "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_utils",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # and with it torch's compiler
)  # fmt: skip
"""As 0.19 names them; earlier versions lack some."""

for name in LATE:
    with suppress(ModuleNotFoundError):
        import_module(name)

compatible_ops = deepspeed.ops.__compatible_ops__
"""Found out on first access, by compiling a C program."""
