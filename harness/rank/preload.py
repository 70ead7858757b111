"""Imports that every rank needs, done once in the fork server and inherited by each fresh process.

Used on the CPU only: a process that has touched the CUDA driver cannot be forked.
"""

import atexit
import gc
import os
import pydoc_data.topics  # noqa: F401 - the default data
import sys

# The server shares the launcher's standard output, where only the launcher may write.
os.dup2(2, 1)
gc.disable()
# Too little memory, or a library that cannot be loaded: one line instead of the way through its modules.
sys.excepthook = lambda kind, error, _: print(f"harness: imports: {kind.__name__} {error}", file=sys.stderr)

import click  # noqa: E402, F401 - each new process imports the main module of the launcher
import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor  # noqa: E402
import transformers  # noqa: E402
import transformers.modeling_utils  # noqa: E402, F401

import harness.backends.ddp  # noqa: E402
import harness.backends.fsdp.fsdp1  # noqa: E402
import harness.backends.fsdp.fsdp2  # noqa: E402
import harness.backends.zero.backend  # noqa: E402
import harness.rank.job_check  # noqa: E402
import harness.rank.rank  # noqa: E402
import harness.record.provenance  # noqa: E402

torch.set_num_threads(1)
harness.record.provenance.package_versions()  # each rank would parse the libraries' descriptions again
for name in os.environ.get("HARNESS_PRELOAD", "").split(","):
    if name:
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue  # the run that needs it will say so
        except Exception as error:  # a broken library must only cost its own backend
            print(f"preloading {name} failed: {error}", file=sys.stderr)

sys.excepthook = sys.__excepthook__
# What was imported lives as long as the server: keep the collectors of its children away from it.
gc.enable()
gc.freeze()
# Nothing is left to write when the server ends: finalising the interpreter would only cost time.
atexit.register(os._exit, 0)
