"""What one rank measured."""

from __future__ import annotations

from harness.record.checkpoint import CheckpointPart
from harness.record.energy import EnergyPart
from harness.record.memory import MemoryPart, SetupMemoryPart
from harness.record.part import HashSum, Part


class WaitPart(Part):
    """A stretch of a traced step in which a rank waited for communication."""

    name: str
    """The collective that was waited for."""
    phase: str
    """Phase of the step."""
    seconds: float
    """Length of the stretch."""


class OverlapPart(Part):
    """How one traced step of one rank divides, from the profiler.

    Computing, exposed communication and idling add up to the step; on a device copies that run alone are the
    rest of it.
    """

    step: int
    """Number of the step."""
    seconds: float
    """Length of the step."""
    compute_seconds: float
    """Computing, whether or not communication runs beside it."""
    communication_seconds: float
    """Communicating, whether or not computation runs beside it."""
    exposed_seconds: float
    """Communicating while nothing computes."""
    copy_seconds: float | None = None
    """Copies and memsets of a device, whatever runs beside them; None: of the CPU, or an older record, where
    they count as computing."""
    idle_seconds: float
    """None of these."""
    waits: list[WaitPart] = []
    """The ten longest, longest first."""


class ProcessorPart(Part):
    """Who used the processors of a rank's machine, from its first timed step to the end of the training."""

    seconds: float
    """How long that is."""
    process_seconds: float
    """Processor time of the rank's process, all threads together."""
    waiting_seconds: float
    """Its threads could have run and waited for a processor, all threads together."""
    machine_busy_seconds: float
    """All processors of the machine together: running any program."""
    machine_stolen_seconds: float
    """The same: taken by the hypervisor while a program could have run."""
    boot: str | None
    """Equal for ranks on one machine, whatever containers they run in; None: not told."""


class RankPart(Part):
    """What one rank measured."""

    rank: int
    """Global rank."""
    host: str
    """Host name of its machine."""
    device_name: str
    """Name of its GPU or processor."""
    setup_seconds: float
    """From the start of the rank to its first step."""
    setup_memory: SetupMemoryPart | None = None
    """Host memory until then; None: the system does not tell, or an older record."""
    step_seconds: list[float]
    """Duration of each step."""
    data_seconds: list[float]
    """The part of each step spent on fetching the batch."""
    phase_seconds: dict[str, list[float]] = {}
    """Per step: 'forward', 'backward' and 'step' (clipping and update), each summed over micro-steps; of a
    pipeline also 'waiting', for other stages."""
    sample_hashes: list[HashSum]
    """Per step, the hash sum over this rank's samples."""
    samples: list[int]
    """Per step, samples of this rank."""
    target_tokens: list[int] = []
    """Per step, tokens whose prediction counts in the loss."""
    loss_sums: list[float | None] = []
    """Per step, the loss summed over this rank's target tokens, as the backend returned it."""
    gradient_norms: list[float | None] = []
    """Per step, the global norm as this rank was told it."""
    batch_digests: list[list[str]] = []
    """For each of the first steps, a digest of every sample that reached the model."""
    batch_hash_sums: list[HashSum | None] = []
    """Per step, the sum modulo 2^64 of a hash of every sample that reached the model."""
    computed_loss_sums: list[float | None] = []
    """Per step, the loss summed over this rank's target tokens as it was computed, whatever the backend
    returned; None: the backend computes it by itself, or it is not finite."""
    early_reduced_bytes: int | None = None
    """Probed steps: payload of reductions in backward passes that were not the last of their step; None:
    nothing was counted, or every step has one."""
    initial_digest: str | None = None
    """Digest of the weights before the first step, as this rank gathered them; None: not taken."""
    final_digest: str | None = None
    """The same after the last step."""
    probe_loss: float | None = None
    """Loss of one batch, equal on all ranks, after training: where it differs, so do the weights."""
    memory: list[MemoryPart]
    """Memory at each moment of the probed steps."""
    checkpoints: list[CheckpointPart] = []
    """Checkpoints saved and loaded, in order."""
    overlap: list[OverlapPart] = []
    """How each traced step divides."""
    overlap_missing: str | None = None
    """Why steps were traced and `overlap` is empty."""
    probe_seconds: dict[str, float] = {}
    """What each probe cost by its own clock, seconds per step in which it ran."""
    timed_probes: list[str] = []
    """Probes that were at work in the timed steps; none should be."""
    matmul_flops_per_second: dict[str, float] = {}
    """By dtype, what matrix products alone reached before the training; where that was asked for."""
    reserved_bytes: int | None = None
    """CUDA: the most that the caching allocator reserved."""
    num_alloc_retries: int | None = None
    """CUDA: the same count as of `memory`, at the end of the training."""
    host_peak_bytes: int | None = None
    """The process's largest resident set, libraries included."""
    processors: ProcessorPart | None = None
    """None: no step was timed, the system keeps no such accounts, or an older record."""
    energy: EnergyPart | None = None
    """None: no step was timed, or an older record."""
