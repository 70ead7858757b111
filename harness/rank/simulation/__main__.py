"""`python -m harness.rank.simulation DIRECTORY`: answers the requests there, each in its own process."""

import gc
import os
import sys
import traceback
from pathlib import Path

from harness.run_directory.request import SimulatedRank, read_requests, read_result, write_result


def answer_all(directory: Path) -> None:
    """Import what all need, then fork for each request: nothing of one simulation reaches the next."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would prefer a GPU that they see
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    gc.disable()  # what is imported stays: collecting meanwhile takes time
    import transformers.modeling_utils  # noqa: F401

    from harness.rank.simulation.simulated_rank import simulate

    gc.freeze()
    gc.enable()
    for index, request in enumerate(read_requests(directory)):
        child = os.fork()
        if child == 0:
            try:
                write_result(directory, index, simulate(request))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # libraries may break off while they are torn down
        _, status = os.waitpid(child, 0)
        if read_result(directory, index) is None:
            code = os.waitstatus_to_exitcode(status)
            how = f"killed by signal {-code}" if code < 0 else "ended without a result"
            reason = f"the process that simulated was {how}"
            write_result(
                directory, index, SimulatedRank(status="failed", reason=reason, tensors=request.tensors)
            )


if __name__ == "__main__":
    answer_all(Path(sys.argv[1]))
