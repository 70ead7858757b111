"""Deterministic records for tests, built without running anything, and published ones."""

from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from harness.backends.base import Effective
from harness.job.job import Job, TrainingSection
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import (
    BackendPart,
    CommunicationPart,
    MemoryPart,
    ModelPart,
    PredictionPart,
    RankPart,
    Record,
    StepPart,
    WeightsPart,
    WindowsPart,
    WorldPart,
)
from harness.record.store import ARCHIVE_NAME, read_runs, write_record

REPORTS = Path(__file__).resolve().parents[1] / "reports"

LOSSES = (5.5, 5.25, 5.0, 4.75)
NORMS = (2.0, 1.5, 1.25, 1.0)
WINDOWS = ("warmup", "probed", "timed", "timed")
JOB = Job(training=TrainingSection(steps=4, global_batch_size=8)).model_dump(mode="json")
ENVIRONMENT = {
    "python": "3.12.0",
    "platform": "Linux-test",
    "cpu": "Test CPU",
    "cores": 8,
    "memory_bytes": 16 * 2**30,
    "gpus": [],
    "packages": {"torch": "2.11.0", "deepspeed": "0.19.8"},
    "code": "0123456789ab",
    "git": {"commit": "f" * 40, "modified": False},
    "variables": {},
}


@cache
def published(name: str) -> tuple[Record, ...]:
    """The records of the published report in a folder of `reports`."""
    runs, problems = read_runs([REPORTS / name / ARCHIVE_NAME])
    assert runs
    assert not problems
    return tuple(record for _, record in runs)


@cache
def published_comparison(name: str) -> Comparison:
    """What is judged of them."""
    return Comparison(published(name))


def told(records: Iterable[Record], *kinds: str) -> list[Finding]:
    """What a comparison of these finds, of kinds that begin so."""
    return [finding for finding in Comparison(records).findings if finding.id.startswith(kinds)]


def make_steps(
    losses: Sequence[float | None] = LOSSES,
    norms: Sequence[float | None] = NORMS,
    *,
    seconds: float = 0.5,
    changes: dict[int, dict[str, Any]] | None = None,
) -> list[StepPart]:
    """Steps of 8 samples and 1024 tokens; `changes` overrides fields of single steps."""
    steps = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        values: dict[str, Any] = {
            "step": step, "window": WINDOWS[min(step, len(WINDOWS) - 1)], "loss": loss, "gradient_norm": norm,
            "learning_rate": 1e-3 / (step + 1), "tokens": 1024, "target_tokens": 1016, "samples": 8,
            "seconds": seconds, "sample_hashes": f"{step:016x}",
        }  # fmt: skip
        steps.append(StepPart(**(values | (changes or {}).get(step, {}))))
    return steps


def make_weights(digest: str = "a" * 64, sketch: dict[str, list[float]] | None = None) -> WeightsPart:
    return WeightsPart(digest=digest, l2_norm=10.0, parameter_count=1000, sketch=sketch)


def make_effective(**changes: Any) -> Effective:
    values: dict[str, Any] = {
        "strategy": "DistributedDataParallel",
        "wrap_units": [""],
        "parameter_dtype": "float32",
        "autocast_dtype": None,
        "master_dtype": "float32",
        "gradient_dtype": "float32",
        "reduce_dtype": "float32",
        "optimizer": "torch.optim.adamw.AdamW",
        "optimizer_groups": [
            {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
            {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        ],
        "gradient_clipping": 1.0,
        "accumulation_steps": 1,
        "gradient_synchronisation": "last micro-step",
        "loss_scale": None,
        "offload": [],
        "parameter_count": 1000,
    }
    return Effective(**(values | changes))


def make_model(**changes: Any) -> ModelPart:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "attention": "sdpa", "parameters": 1000, "tied_parameters": 0,
        "activation_checkpointing": False, "config": {},
    }  # fmt: skip
    return ModelPart(**(values | changes))


def make_ranks(world_size: int, state_bytes: int = 16_000, **fields: Any) -> list[RankPart]:
    """`fields`: others of a rank; a list has a value of each, anything else is of all."""
    quarter = state_bytes // 4
    kinds = {"weights": quarter, "gradients": quarter, "optimizer": 2 * quarter}
    return [
        RankPart(
            rank=rank,
            host="host",
            device_name="cpu",
            setup_seconds=1.0,
            step_seconds=[0.5] * 4,
            data_seconds=[0.01] * 4,
            sample_hashes=["0" * 16] * 4,
            samples=[8 // world_size] * 4,
            memory=[
                MemoryPart(
                    step=1, moment="after_backward", allocated_bytes=state_bytes,
                    peak_bytes=2_000_000 + 1000 * rank, kinds=kinds,
                )
            ],
        ).model_copy(update={name: of[rank] if isinstance(of, list) else of for name, of in fields.items()})
        for rank in range(world_size)
    ]  # fmt: skip


Model = TypeVar("Model")


def changed(record: Model, **fields: Any) -> Model:
    """The record, or a part, with other fields; a dict changes a part: `world={"device": "cuda"}`."""
    parts = {name: getattr(record, name) for name, given in fields.items() if isinstance(given, dict)}
    new = fields | {
        name: changed(of, **fields[name]) for name, of in parts.items() if not isinstance(of, dict)
    }
    return replace(record, **new) if is_dataclass(record) else record.model_copy(update=new)  # type: ignore


def on_stub(record: Record) -> Record:
    """The same run on devices of the CUDA stub."""
    ranks = [rank.model_copy(update={"device_name": "CUDA stub"}) for rank in record.ranks]
    return changed(record, world={"device": "cuda", "collectives": "nccl"}, ranks=ranks)


def make_communication(
    world_size: int, op: str = "all_reduce", payload_bytes: int = 4000
) -> list[CommunicationPart]:
    return [
        CommunicationPart(
            rank=rank, phase="backward", op=op, dtype="float32", group="0",
            group_ranks=list(range(world_size)), group_size=world_size, calls=1,
            payload_bytes=payload_bytes,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def make_prediction(peak_bytes: int, **changes: Any) -> PredictionPart:
    values: dict[str, Any] = {
        "peak_bytes": peak_bytes, "moment": "optimizer step", "kinds": {"weights": peak_bytes},
        "device_bytes": peak_bytes, "host_bytes": peak_bytes, "made_by": "sharding-harness 0.1.0",
    }  # fmt: skip
    return PredictionPart(**(values | changes))


def _options(label: str) -> dict[str, Any]:
    pairs = (pair.partition("=") for pair in label.partition(":")[2].split(",") if pair)
    return {key: value for key, _, value in pairs}


def make_record(**changes: Any) -> Record:
    """A finished run of the reference, with any field of the record replaced.

    `label` and `world_size` and `training` and `model` shape the parts that follow from them; `effective`,
    and dicts as `environment`, `world` and `backend`, change some of their fields.
    """
    label: str = changes.pop("label", "single")
    name = label.partition(":")[0]
    world_size: int = changes.pop("world_size", 1 if name == "single" else 2)
    training: dict[str, Any] = changes.pop("training", {})
    model: dict[str, Any] = changes.pop("model", {})
    effective = make_effective(**changes.pop("effective", {}))
    if isinstance(given := changes.get("environment"), dict):
        changes["environment"] = ENVIRONMENT | given
    parts = {name: changes.pop(name) for name in ("world", "backend") if isinstance(changes.get(name), dict)}
    values: dict[str, Any] = {
        "run_id": f"run-{name}-n{world_size}",
        "created_at": "2026-01-02T03:04:05.678+00:00",
        "status": "ok",
        "command": ["harness", "compare", "--backends", "ddp"],
        "job": JOB | {"training": JOB["training"] | training, "model": JOB["model"] | model},
        "job_id": "0123456789ab",
        "cell": f"cell-{label}-{world_size}",
        "repeat": 0,
        "backend": BackendPart(
            label=label, name=name, options=_options(label), effective=effective, native_config={},
            versions={"torch": "2.11.0"},
        ),
        "world": WorldPart(
            nodes=1, ranks_per_node=world_size, world_size=world_size, device="cpu", collectives="gloo",
            threads_per_rank=1, micro_batch_size=max(1, 8 // world_size), accumulation_steps=1,
            preset=_options(label).get("preset", "like-for-like"),
        ),
        "environment": ENVIRONMENT,
        "initial_weights": make_weights(),
        "final_weights": make_weights("b" * 64),
        "steps": make_steps(),
        "ranks": make_ranks(world_size),
        "comm": make_communication(world_size) if world_size > 1 else [],
        "windows": WindowsPart(warmup=1, probed=1, timed=2),
    }  # fmt: skip
    return changed(Record(**(values | changes)), **parts)


def written(folder: Path, *records: Record) -> list[tuple[Path, Record]]:
    """Records in run folders of their names, within a folder of runs; each with its file."""
    for record in records:
        (folder / record.run_id).mkdir(parents=True, exist_ok=True)
    return [(write_record(folder / record.run_id, record), record) for record in records]


def saved(folder: Path, run_id: str, **changes: Any) -> Path:
    """The file of one that is made so."""
    ((path, _),) = written(folder, make_record(run_id=run_id, **changes))
    return path
