"""What DeepSpeed 0.19 imports and tries out late: half a second of each rank's start, done once instead.

A fork server imports this module before it forks ranks that will use DeepSpeed.
"""

import deepspeed
import deepspeed.ops
from deepspeed.comm import mori  # noqa: F401
from deepspeed.module_inject import auto_ep_layer  # noqa: F401
from deepspeed.runtime.superoffload import superoffload_utils  # noqa: F401
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 - and with it torch's compiler

compatible_ops = deepspeed.ops.__compatible_ops__
"""Found out on first access, by compiling a C program."""
