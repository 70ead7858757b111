"""Turns what ranks left behind into a record, whether they finished or not."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

from harness.backends import registry
from harness.provenance import package_versions
from harness.record import (
    BackendPart,
    CommunicationPart,
    ErrorPart,
    EvaluationPart,
    MemoryPart,
    ObservedPart,
    OverlapPart,
    RankPart,
    Record,
    Status,
    StepPart,
    WeightsPart,
    WindowsPart,
    WorldPart,
)
from harness.run_directory.nodes import run_environment
from harness.run_directory.outcome import Outcome, signal_name
from harness.run_directory.request import (
    RunRequest,
    checkpoint_folder,
    launcher_log,
    rank_file,
    rank_log,
    snapshot_file,
    trace_file,
)
from harness.run_directory.side_files import log_tail
from harness.run_directory.tail import Tail

PHASES = ("forward", "backward", "step")
Events = dict[int, dict[str, list[dict[str, Any]]]]


def assemble(run_directory: Path, request: RunRequest, outcome: Outcome) -> Record:
    """Build the record of a run from its ranks' events and the way its processes ended."""
    tails = {rank: Tail(rank_file(run_directory, rank)) for rank in range(request.world_size)}
    events = {rank: _by_kind(tail.read()) for rank, tail in tails.items()}
    broken = sum(tail.broken_lines for tail in tails.values())
    if broken:
        _end_at_gaps(events, "step")
        _end_at_gaps(events, "evaluation")
    steps = _steps(events)
    status, error = _status(run_directory, request, events, steps, outcome)
    setup = _first(events[0], "setup") or {}
    final = _first(events[0], "final")
    entry, options = registry.parse(request.backend)
    windows: list[str] = [step.window for step in steps]
    initial = setup.get("initial_weights")
    return Record(
        run_id=request.run_id,
        created_at=request.created_at,
        status=status,
        error=error,
        reasons=_reasons(events),
        command=request.command,
        job=request.job,
        job_id=request.job_id,
        cell=request.cell,
        repeat=request.repeat,
        measure=request.measure,
        backend=BackendPart(
            label=request.backend,
            name=entry.name,
            options=options.model_dump(mode="json"),
            effective=setup.get("effective"),
            native_config=setup.get("native_config"),
            versions=setup.get("versions") or package_versions(),
            claim=setup.get("claim"),
            own_forms=setup.get("own_forms"),
        ),
        world=WorldPart(
            nodes=request.world_size // request.ranks_per_node,
            ranks_per_node=request.ranks_per_node,
            world_size=request.world_size,
            device=request.device,
            collectives=setup.get("collectives") or ("nccl" if request.device == "cuda" else "gloo"),
            threads_per_rank=request.threads_per_rank,
            micro_batch_size=request.micro_batch_size,
            accumulation_steps=request.accumulation_steps,
            preset=request.preset,
        ),
        environment=run_environment(run_directory).model_copy(update={"broken_event_lines": broken}),
        layout=setup.get("layout"),
        model=setup.get("model"),
        data=setup.get("data"),
        initial_weights=WeightsPart(**initial) if initial else None,
        final_weights=WeightsPart(**final["weights"]) if final and final["weights"] else None,
        observed=ObservedPart(**final["observed"]) if final else None,
        steps=steps,
        ranks=[part for rank in events if (part := _rank(rank, events[rank])) is not None],
        comm=[
            CommunicationPart(rank=rank, **row)
            for rank in events
            for row in (_first(events[rank], "measured") or {}).get("communication", [])
        ],
        eval=_evaluations(events),
        windows=WindowsPart(**{name: windows.count(name) for name in WindowsPart.model_fields}),
        skipped_steps=sum(step.gradient_norm is None for step in steps)
        if request.job.training.precision == "fp16-mixed"
        else 0,
        artifacts=_artifacts(run_directory, request),
    )


def _artifacts(run_directory: Path, request: RunRequest) -> dict[str, str]:
    """What ranks left beside their events: traces, snapshots of CUDA memory, a checkpoint."""
    kinds = (("trace", trace_file), ("memory snapshot", snapshot_file))
    files = {
        f"{what} of rank {rank}": name(run_directory, rank)
        for rank in range(request.world_size)
        for what, name in kinds
    }
    if request.measure.keep_checkpoint:
        files["checkpoint"] = checkpoint_folder(run_directory)
    return {what: file.name for what, file in files.items() if file.exists()}


def _by_kind(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        kinds.setdefault(event.pop("kind"), []).append(event)
    return kinds


def _end_at_gaps(events: Events, kind: str) -> None:
    """Leave out what a rank said after a line that was lost: ranks are compared row by row."""
    whole = max((kinds.get(kind, []) for kinds in events.values()), key=len)
    for kinds in events.values():
        pairs = zip(kinds.get(kind, []), whole, strict=False)
        kinds[kind] = [row for row, _ in takewhile(lambda pair: pair[0]["step"] == pair[1]["step"], pairs)]


def _first(kinds: dict[str, list[dict[str, Any]]], kind: str) -> dict[str, Any] | None:
    found = kinds.get(kind)
    return found[0] if found else None


def _reasons(events: Events) -> list[str]:
    """What the ranks said, each sentence once."""
    said = [r for kinds in events.values() for e in kinds.get("unsupported", []) for r in e["reasons"]]
    return list(dict.fromkeys(said))


def _steps(events: Events) -> list[StepPart]:
    """Steps that every rank finished, summed over the ranks."""
    per_rank = [kinds.get("step", []) for kinds in events.values()]
    return [_step(list(rows)) for rows in zip(*per_rank, strict=False)]


def _step(rows: list[dict[str, Any]]) -> StepPart:
    first = rows[0]
    sums = [row["loss_sum"] for row in rows]
    loss = None if None in sums else sum(sums) / first["global_target_tokens"]
    return StepPart(
        step=first["step"],
        window=first["window"],
        loss=loss,
        gradient_norm=first["gradient_norm"],
        learning_rate=first["learning_rate"],
        applied_learning_rate=_applied_learning_rate(rows),
        applied_gradient_norm=_applied_gradient_norm(rows),
        tokens=sum(row["tokens"] for row in rows),
        target_tokens=sum(row["target_tokens"] for row in rows),
        samples=sum(row["samples"] for row in rows),
        seconds=max(row["seconds"] for row in rows),
        sample_hashes=f"{sum(int(row['sample_hashes'], 16) for row in rows) % 2**64:016x}",
    )


def _applied_learning_rate(rows: list[dict[str, Any]]) -> float | None:
    asked: float = rows[0]["learning_rate"]
    applied = [rate for row in rows if (rate := row.get("applied_learning_rate")) is not None]
    return max(applied, key=lambda rate: abs(rate - asked), default=None)


def _applied_gradient_norm(rows: list[dict[str, Any]]) -> float | None:
    """Ranks hold disjoint parts of the gradient, or each of them all of it: told by how much they hold."""
    applied = [part for row in rows if (part := row.get("applied")) and part["squares"] is not None]
    if len(applied) < len(rows):
        return None
    copies = max(1, round(sum(part["share"] for part in applied)))
    return float((sum(part["squares"] for part in applied) / copies) ** 0.5)


def _rank(rank: int, kinds: dict[str, list[dict[str, Any]]]) -> RankPart | None:
    setup = _first(kinds, "setup")
    if setup is None:
        return None
    measured = _first(kinds, "measured") or {}
    final = _first(kinds, "final") or {}
    steps = kinds.get("step", [])
    memory = [MemoryPart(**row) for row in measured.get("memory", [])]
    return RankPart(
        rank=rank,
        host=setup["host"],
        device_name=setup["device_name"],
        setup_seconds=setup["setup_seconds"],
        step_seconds=[row["seconds"] for row in steps],
        data_seconds=[row["data_seconds"] for row in steps],
        phase_seconds={phase: [row["phase_seconds"][phase] for row in steps] for phase in PHASES},
        sample_hashes=[row["sample_hashes"] for row in steps],
        samples=[row["samples"] for row in steps],
        target_tokens=[row["target_tokens"] for row in steps],
        loss_sums=[row["loss_sum"] for row in steps],
        gradient_norms=[row["gradient_norm"] for row in steps],
        batch_digests=[row["batch_digests"] for row in steps if "batch_digests" in row],
        batch_hash_sums=[row.get("batch_hash_sum") for row in steps],
        computed_loss_sums=[row.get("computed_loss_sum") for row in steps],
        early_reduced_bytes=measured.get("early_reduced_bytes"),
        initial_digest=(setup.get("initial_weights") or {}).get("digest"),
        final_digest=(final.get("weights") or {}).get("digest"),
        probe_loss=final.get("probe_loss"),
        memory=memory,
        overlap=[OverlapPart(**row) for row in measured.get("overlap", [])],
        probe_seconds=measured.get("probe_seconds", {}),
        timed_probes=measured.get("timed_probes", []),
        matmul_flops_per_second=setup.get("matmul_flops_per_second", {}),
        reserved_bytes=measured.get("reserved_bytes"),
        host_peak_bytes=measured.get("host_peak_bytes"),
    )


def _evaluations(events: Events) -> list[EvaluationPart]:
    per_rank = [kinds.get("evaluation", []) for kinds in events.values()]
    parts = []
    for rows in zip(*per_rank, strict=False):
        targets = sum(row["target_tokens"] for row in rows)
        sums = [row["loss_sum"] for row in rows]
        loss = None if None in sums or targets == 0 else sum(sums) / targets
        parts.append(
            EvaluationPart(
                step=rows[0]["step"],
                loss=loss,
                target_tokens=targets,
                samples=rows[0]["samples"],
                seconds=max(row["seconds"] for row in rows),
            )
        )
    return parts


def _status(
    run_directory: Path,
    request: RunRequest,
    events: Events,
    steps: list[StepPart],
    outcome: Outcome,
) -> tuple[Status, ErrorPart | None]:
    finished = all("done" in kinds for kinds in events.values())
    if outcome.verdict is not None and not finished:
        return outcome.verdict.status, ErrorPart(
            kind=outcome.verdict.kind,
            message=f"{outcome.verdict.cause} after {len(steps)} steps",
            log_tail=_log_tail(run_directory, 0),
        )
    killed = [(rank, code) for rank, code in outcome.exit_codes.items() if code is not None and code < 0]
    if killed:
        # The others fail because this one is gone, and may say so before anybody sees it die.
        return "failed", _exit_error(run_directory, *killed[0])
    failures = [
        (event["at"], rank, event) for rank, kinds in events.items() for event in kinds.get("failure", [])
    ]
    if failures:
        # The first to fail is the cause; the others fail because it is gone.
        _, rank, event = min(failures, key=lambda failure: failure[:2])
        return event["status"], ErrorPart(
            kind=event["error_kind"],
            message=event["message"],
            rank=rank,
            log_tail=_log_tail(run_directory, rank),
        )
    if _reasons(events):
        return "unsupported", None
    if finished:
        lost = [step.step for step in steps if step.loss is None]
        if lost:
            return "diverged", ErrorPart(
                kind="NotFinite", message=f"the loss is not finite from step {lost[0]} on"
            )
        return "ok", None
    if outcome.stopped == "timeout":
        return "timeout", ErrorPart(
            kind="Timeout", message=f"stopped after {len(steps)} steps: runtime.timeout_seconds passed"
        )
    if outcome.stopped == "interrupted":
        return "failed", ErrorPart(
            kind="Interrupted", message=f"interrupted by the user after {len(steps)} steps"
        )
    rank, code = next(
        ((rank, code) for rank, code in outcome.exit_codes.items() if code not in (0, None)),
        (0, outcome.exit_codes.get(0)),
    )
    return "failed", _exit_error(run_directory, rank, code)


def _exit_error(run_directory: Path, rank: int, code: int | None) -> ErrorPart:
    return ErrorPart(
        kind="Exit", message=_exit_message(code), rank=rank, log_tail=_log_tail(run_directory, rank)
    )


def _exit_message(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (the kernel's out-of-memory killer ends processes so)" if code == -9 else ""
        return f"the rank was killed by {signal_name(code)}{hint}"
    return f"the rank ended with exit code {code} without having finished"


def _log_tail(run_directory: Path, rank: int) -> str:
    return log_tail(rank_log(run_directory, rank)) or log_tail(launcher_log(run_directory))
