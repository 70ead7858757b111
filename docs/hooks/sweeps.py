"""From where on dividing the model pays: `harness estimate` against the best data-parallel strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from harness.backends import registry
from harness.errors import HarnessError
from harness.forms.pipeline import bubble_share
from harness.job.config import load_experiment
from harness.plan.answer import estimate
from harness.plan.hardware import PRESET, load_hardware
from harness.plan.model import PlannedModel
from harness.plan.models import load_model
from harness.plan.prediction import Prediction
from harness.plan.question import ask

GPU, PER_NODE, GPUS = "H100-80", 8, 64
FABRICS = ("NDR400", "HDR100", "Ethernet-25", "Ethernet-10")
"""From fast to slow."""
MARGIN = 1.05
"""Of the speed of the best data-parallel strategy: what pays is faster by more than 5 %."""
COMMON = (
    "training.precision=bf16-mixed", "training.activation_checkpointing=true",
    f"runtime.preset={PRESET}",
)  # fmt: skip
RIVALS = (
    "ddp", "zero1", "zero3", "zero3:hpz=8", "fsdp", "fsdp:reshard=8", "fsdp-grad-op", "fsdp-hybrid",
    "zero1:offload=optimizer", "zero3:offload=cpu", "fsdp:offload=cpu",
)  # fmt: skip
"""Data-parallel strategies, with offload and second copies; the fastest that fits is the one to beat."""
MICRO_BATCHES = (1, 2, 4, 8)
DEGREES = (2, 4, 8)
"""Ranks that share samples, within a node."""
LENGTHS = tuple(2**power for power in (12, 13, 14, 15, 16, 17, 19))
LENGTH = 4096
BATCHES = (8, 16, 32, 64, 128)
"""Samples in a step, around the number of GPUs."""
LARGE_GPUS = (8, 16, 32, 64)
SMALL, MEDIUM, LARGE = "llama-3.1-8b", "qwen2.5-32b", "llama-3.1-70b"
STAGES = 16
PIPELINED = (64, 128, 256, 1024)
"""Samples in a step; each pipeline of STAGES ranks has a part of them, one in a micro-batch."""
COPIES = {
    "fsdp": None, "fsdp:reshard=8": "fsdp", "zero3": None, "zero3:hpz=8": "zero3", "fsdp-hybrid": "fsdp",
    "fsdp-hybrid:shard_size=32": "fsdp",
}  # fmt: skip
"""Second copies and replicas -> what they are compared with."""
COPIED_SAMPLES, COPIED_MICRO = 128, 2
IN_LOSS = "inside the segment that computes"


def gigabytes(row: Prediction) -> float:
    """Memory of the fullest GPU."""
    assert row.memory
    return row.memory.device_bytes / 1e9


def rate(row: Prediction | None) -> float:
    """Tokens/s for each of its GPUs; 0 where nothing fits."""
    return row.speed.tokens_per_second_per_gpu if row is not None and row.speed else 0.0


def total(row: Prediction | None) -> float:
    """Tokens/s of all GPUs that it uses."""
    return 0.0 if row is None else rate(row) * row.world_size


def fits(row: Prediction) -> bool:
    return row.verdict is not None and row.verdict.fits and row.speed is not None


def rows(
    name: str, labels: Sequence[str], *, samples: int, micro: int, length: int = LENGTH, gpus: int = GPUS,
    fabric: str = FABRICS[0], settings: Sequence[str] = (),
) -> list[Prediction]:  # fmt: skip
    """Predictions at one micro-batch; of strategies that cannot divide the samples, none."""
    hardware = load_hardware()
    batch = (f"training.global_batch_size={samples}", f"training.micro_batch_size={micro}")
    try:
        asked = ask(
            _model(name, length),
            load_experiment(None, (*COMMON, *batch, *settings, f"data.sequence_length={length}")),
            backends=labels, world_sizes=(gpus,), ranks_per_node=PER_NODE, device=hardware.device(GPU),
            fabric=hardware.fabric(fabric),
        )  # fmt: skip
        return [row for row in estimate(asked) if row.memory is not None]
    except HarnessError:
        return []


def _model(name: str, length: int) -> PlannedModel:
    """A model with positions for the length, where its own do not reach."""
    model = load_model(name)
    most = max(length, int(model.config["max_position_embeddings"]))
    return replace(model, config={**model.config, "max_position_embeddings": most})


def tried(name: str, labels: Sequence[str], *, samples: int, **asked: object) -> Iterator[Prediction]:
    """Predictions at every micro-batch that divides."""
    for micro in MICRO_BATCHES:
        yield from rows(name, labels, samples=samples, micro=micro, **asked)  # type: ignore[arg-type]


def best(found: Sequence[Prediction]) -> Prediction | None:
    """The fastest that fits."""
    return max(filter(fits, found), key=rate, default=None)


def degrees(backend: str) -> tuple[str, ...]:
    """A backend with each number of ranks that share samples."""
    option = "tensor" if "tensor" in registry.BUILT_IN[backend].options_class().model_fields else "sequence"
    return tuple(f"{backend}:{option}={degree}" for degree in DEGREES)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The best data-parallel row and the best of each divided strategy, by what is varied."""

    plain: dict[int, Prediction | None]
    """None: nothing fits."""
    least: dict[int, Prediction]
    """What needs least of the data-parallel ones."""
    divided: dict[str, dict[int, Prediction | None]]

    def ratio(self, backend: str, value: int) -> float:
        """Speed of all GPUs over that of the best data-parallel strategy; infinite where only it fits."""
        plain, divided = total(self.plain[value]), total(self.divided[backend][value])
        return divided / plain if plain else float("inf") if divided else 0.0

    def pays(self, backend: str) -> list[int]:
        """Where it is faster by more than the margin, or the only one that fits."""
        return [value for value in self.plain if self.ratio(backend, value) > MARGIN]

    def fits(self, backend: str) -> list[int]:
        return [value for value, row in self.divided[backend].items() if row is not None]

    def plain_fits(self) -> list[int]:
        return [value for value, row in self.plain.items() if row is not None]


def _sweep(
    given: dict[int, dict[str, object]], backends: Sequence[str], *, plain_gpus: bool = False
) -> Sweep:
    """`given`: what is asked by the value that varies; plain_gpus: no more GPUs than samples."""
    plain: dict[int, Prediction | None] = {}
    least: dict[int, Prediction] = {}
    divided: dict[str, dict[int, Prediction | None]] = {backend: {} for backend in backends}
    for value, asked in given.items():
        fewer = {"gpus": min(GPUS, value)} if plain_gpus else {}
        rivals = list(tried(labels=RIVALS, **(asked | fewer)))  # type: ignore[arg-type]
        plain[value] = best(rivals)
        least[value] = min(rivals, key=gigabytes)
        for backend in backends:
            divided[backend][value] = best(list(tried(labels=degrees(backend), **asked)))  # type: ignore[arg-type]
    return Sweep(plain=plain, least=least, divided=divided)


@cache
def by_length() -> Sweep:
    """One sample a GPU of SMALL, ever longer."""
    given = {n: {"name": SMALL, "samples": GPUS, "length": n} for n in LENGTHS}
    return _sweep(given, ("fsdp-cp", "ulysses-zero3"))  # type: ignore[arg-type]


CHUNKED = "loss.chunk_tokens=1024"


@cache
def chunked() -> Sweep:
    """The same with the loss in chunks, under data parallelism alone."""
    given = {n: {"name": SMALL, "samples": GPUS, "length": n, "settings": (CHUNKED,)} for n in LENGTHS}
    return _sweep(given, ())  # type: ignore[arg-type]


@cache
def by_batch() -> Sweep:
    """Fewer and fewer samples of SMALL; data parallelism uses no more GPUs than there are."""
    given = {n: {"name": SMALL, "samples": n} for n in BATCHES}
    backends = ("tp", "fsdp-tp", "fsdp-cp", "ulysses-zero3")
    return _sweep(given, backends, plain_gpus=True)  # type: ignore[arg-type]


@cache
def by_gpus() -> Sweep:
    """LARGE with one sample a GPU."""
    given = {n: {"name": LARGE, "samples": n, "gpus": n} for n in LARGE_GPUS}
    return _sweep(given, ("tp", "fsdp-tp", "autotp-zero1", "ulysses-zero3"))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """MEDIUM in STAGES stages and data-parallel, by network and samples in a step."""

    plain: dict[tuple[str, int], Prediction | None]
    staged: dict[tuple[str, int], Prediction | None]

    def ratio(self, fabric: str, samples: int) -> float:
        plain = rate(self.plain[fabric, samples])
        return rate(self.staged[fabric, samples]) / plain if plain else float("inf")

    def pays(self, fabric: str) -> list[int]:
        """Samples in a step with which it is faster by more than the margin."""
        return [samples for samples in PIPELINED if self.ratio(fabric, samples) > MARGIN]


def parts_of(samples: int) -> int:
    """Micro-batches of a pipeline, of one sample each."""
    return samples * STAGES // GPUS


@cache
def pipelines() -> Pipelines:
    """Every pipeline of the page, and what it is compared with."""
    plain: dict[tuple[str, int], Prediction | None] = {}
    staged: dict[tuple[str, int], Prediction | None] = {}
    for samples in PIPELINED:
        parts = parts_of(samples)
        label = f"pp:micro_batches={parts},stages={STAGES}"
        # Memory is the same on every network.
        labels = {m: tuple(_fitting(MEDIUM, samples, m)) for m in MICRO_BATCHES}
        for fabric in FABRICS:
            found = [
                row for micro, fitting in labels.items() if fitting
                for row in rows(MEDIUM, fitting, samples=samples, micro=micro, fabric=fabric)
            ]  # fmt: skip
            plain[fabric, samples] = best(found)
            staged[fabric, samples] = best(
                rows(MEDIUM, (label,), samples=samples, micro=parts, fabric=fabric)
            )
    return Pipelines(plain=plain, staged=staged)


def _fitting(name: str, samples: int, micro: int) -> Iterator[str]:
    return (row.label for row in rows(name, RIVALS, samples=samples, micro=micro) if fits(row))


def enough_parts(share: float, *, stages_per_rank: int = 1) -> int:
    """Fewest micro-batches with a bubble below the share, by the closed form."""
    parts = 1
    while bubble_share(ranks=STAGES, micro_batches=parts, stages_per_rank=stages_per_rank) >= share:
        parts += 1
    return parts


@cache
def copies() -> dict[tuple[str, str], Prediction]:
    """LARGE by network and strategy of COPIES."""
    found = {
        f: rows(LARGE, tuple(COPIES), samples=COPIED_SAMPLES, micro=COPIED_MICRO, fabric=f) for f in FABRICS
    }
    return {(f, label): row for f, rs in found.items() for label, row in zip(COPIES, rs, strict=True)}


def copies_pay(label: str) -> list[str]:
    """Networks on which it fits and is faster than what it is compared with by more than the margin."""
    other = COPIES[label]
    assert other
    return [
        fabric
        for fabric in FABRICS
        if fits(copies()[fabric, label])
        and rate(copies()[fabric, label]) > MARGIN * rate(copies()[fabric, other])
    ]


def in_loss(row: Prediction) -> float:
    """GB that the fullest segment, here the loss, takes beside what others keep."""
    assert row.memory
    return sum(term.bytes for term in row.memory.decisive.terms if term.name == IN_LOSS) / 1e9
