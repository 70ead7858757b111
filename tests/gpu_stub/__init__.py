"""Tests on a CUDA machine without a GPU: torch's CUDA wheel over a stub of the runtime and of NCCL.

`make test-gpu-stub` sets the machine up and runs them. CONTRIBUTING.md says what they show and what not, and
lists the variables that give the machine its size and its faults. A test takes the fixture `machine`:

    def test_memory_that_does_not_suffice(machine: Machine) -> None:
        little = {"CUDA_STUB_MEMORY_BYTES": "1000000", "CUDA_STUB_FAULT_RANK": "1"}
        record = machine.run("fsdp", 2, ["training.precision=bf16-mixed"], little)
        assert record.status == "oom"

`run` and `compare` fork their ranks from one server that has imported the libraries, a few seconds a run;
`harness` starts the command line itself, as a user does: half a minute a run. Equal runs are run once.
"""
