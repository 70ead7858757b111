"""peft, and what it imports late: seconds of each rank's start, done once instead.

A fork server imports this module before it forks ranks of a job with adapters.
"""

import logging
from contextlib import suppress
from importlib import import_module

# peft imports bitsandbytes, which tells of optional kernels for 4-bit weights on CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

from peft import LoraConfig, inject_adapter_in_model  # noqa: E402

__all__ = ["LoraConfig", "inject_adapter_in_model"]

with suppress(ImportError):  # without bitsandbytes peft adapts all other layers
    import_module("peft.tuners.lora.bnb")
