"""The JSON document of an estimate: per rank, in bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.forms.terms import Term
from harness.plan.alternatives import NO_WAYS, Ways, least_of
from harness.plan.command_words import estimate_command
from harness.plan.estimate.question import EstimateRequest
from harness.plan.estimate.row import EstimateRow, trust_of
from harness.plan.prediction import MemoryPrediction
from harness.plan.time.computing import attention_kernel
from harness.plan.time.speed import SpeedPrediction


def document(
    asked: EstimateRequest,
    rows: Sequence[EstimateRow],
    instead: Ways = NO_WAYS,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """What `harness estimate --json` prints. `instead`, `words`: as of `estimate_lines`."""
    experiment, device, fabric = asked.experiment, asked.device, asked.network
    trust = trust_of(rows, least_of(instead))
    return {
        "model": asked.model.name,
        "parameters": asked.model.parameters,
        "architecture": asked.model.architecture,
        "model_source": asked.model.source,
        "job": {
            "sequence_length": experiment.data.sequence_length,
            "precision": experiment.training.precision,
            "activation_checkpointing": experiment.training.activation_checkpointing,
            "gradient_clipping": experiment.training.gradient_clipping,
            "optimizer_implementation": experiment.optimizer.implementation,
            "attention": attention_kernel(asked.model, experiment.model),
            "preset": experiment.runtime.preset,
        },
        "ranks_per_node": asked.gpus_per_node,
        "gpu": None
        if device is None
        else {"name": device.name, "memory_bytes": device.memory_bytes, "source": device.source},
        "fabric": None
        if fabric is None
        else {"name": fabric.name, "source": fabric.source, "assumed": fabric.assumed},
        "remarks": list(asked.remarks),
        "rows": [_row(row) for row in rows],
        "alternatives": [
            {**one.as_json(), "instead_of_ranks": size, "command": estimate_command(one, words)}
            for size, ways in instead.items()
            for one in ways
        ],
        "trust": trust.as_json() if trust else None,
    }


def _row(row: EstimateRow) -> dict[str, Any]:
    scenario, memory, verdict = row.scenario, row.memory, row.verdict
    return {
        "backend": row.label,
        "world_size": row.world_size,
        "unsupported": row.unsupported,
        "micro_batch_size": scenario.micro_batch_size if scenario else None,
        "accumulation_steps": scenario.accumulation_steps if scenario else None,
        "weights_bytes": row.state_bytes("weights"),
        "gathered_bytes": row.most_bytes("gathered"),
        "gradients_bytes": row.state_bytes("gradients"),
        # As the ZeRO paper counts optimizer states: the fp32 masters belong to them.
        "optimizer_bytes": row.state_bytes("masters", "optimizer"),
        "optimizer_parts": {
            "masters_bytes": row.state_bytes("masters"),
            "moments_bytes": row.state_bytes("optimizer"),
        },
        "model_state_bytes": row.state_bytes("weights", "gradients", "masters", "optimizer"),
        "textbook_model_state_bytes": _rounded(row.textbook_state_bytes),
        "activation_bytes": row.most_bytes("activations"),
        "temporary_bytes": row.most_bytes("temporary"),
        "communication_buffer_bytes": row.most_bytes("communication"),
        "peak_bytes": memory.peak_bytes if memory else None,
        "decisive_moment": memory.decisive.name if memory else None,
        "moments": _moments(memory),
        "device_bytes": memory.device_bytes if memory else None,
        "host_bytes_per_node": memory.host_bytes_per_node if memory else None,
        "file_bytes_per_node": None,
        "memory_unknown": row.memory_unknown,
        "reduced_each_time": row.reduced_each_time,
        "peak_bytes_between": row.peak_bytes_between,
        "fits": verdict.fits if verdict else None,
        "verdict": verdict.said if verdict else None,
        "margin_bytes": verdict.margin_bytes if verdict else None,
        "sent_bytes_per_step": _rounded(None if row.unsupported else row.sent_bytes),
        "sent_bytes_between_nodes_per_step": _rounded(None if row.unsupported else row.between_bytes),
        "textbook_sent_bytes_per_step": _rounded(row.textbook_sent_bytes),
        "bubble": row.bubble,
        "collectives": [
            {
                "term": line.term, "phase": line.phase, "op": line.op, "dtype": line.dtype, "role": line.role,
                "group_size": line.group_size, "calls": line.calls, "payload_bytes": line.payload_bytes,
                "sent_bytes": round(line.sent_bytes), "between_nodes_bytes": round(line.between_bytes),
            }
            for line in row.traffic
        ],
        **_speed(row),
        "formulae": formulae(row),
    }  # fmt: skip


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _moments(memory: MemoryPrediction | None) -> dict[str, dict[str, int]] | None:
    """Bytes by kind at each moment."""
    if memory is None:
        return None
    return {moment.name: moment.kinds for moment in memory.moments}


FIGURES = (
    "computing_seconds", "communication_seconds", "exposed_seconds", "step_seconds",
    "tokens_per_second_per_gpu", "model_flops_utilization", "guide_ratio", "peak_ratio",
)  # fmt: skip
"""Of a speed, under the same names."""


def _speed(row: EstimateRow) -> dict[str, Any]:
    speed = row.speed
    return {
        **{name: getattr(speed, name) if speed else None for name in FIGURES},
        "hours_per_billion_tokens": row.hours_per_billion_tokens,
        "kilowatt_hours_per_billion_tokens": row.kilowatt_hours_per_billion_tokens,
        "speed_unknown": row.speed_unknown,
    }


def formulae(row: EstimateRow) -> list[dict[str, Any]]:
    """Every line behind a row: quantity, value, formula and source."""
    lines: list[dict[str, Any]] = []
    if row.memory is not None:
        moment = row.memory.decisive
        lines += [_term(f"memory, {moment.name}", term) for term in moment.terms]
        lines += [_term("memory beside the allocator", term) for term in row.memory.overhead]
    lines += [
        {
            "quantity": f"sent, {line.phase}: {line.term} ({line.op}, {line.dtype})",
            "bytes": round(line.sent_bytes), "formula": line.formula, "source": line.source,
        }
        for line in row.traffic
    ]  # fmt: skip
    if row.speed is not None:
        for name, terms in (("computing", row.speed.computing), ("communication", row.speed.communication)):
            lines += [
                {"quantity": f"{name}: {term.name}", "seconds": term.seconds, "formula": term.formula,
                 "source": term.source}
                for term in terms
            ]  # fmt: skip
        lines += _ratios(row.speed)
    return lines


def _ratios(speed: SpeedPrediction) -> list[dict[str, Any]]:
    """Communication over computing at the peaks of data sheets, and what decision guides compute."""
    source = "harness.forms.network"
    found = [
        ("communication over computing, both at their peaks", speed.peak_ratio, "(bytes / B) / (6 P T / F)"),
        ("ratio of decision guides", speed.guide_ratio, "Ultra-Scale Playbook; carries P below stage 3"),
    ]
    return [
        {"quantity": name, "ratio": value, "formula": formula, "source": source}
        for name, value, formula in found
        if value is not None
    ]


def _term(what: str, term: Term) -> dict[str, Any]:
    return {
        "quantity": f"{what}: {term.kind}, {term.name}", "bytes": term.bytes, "formula": term.formula,
        "source": term.source,
    }  # fmt: skip
