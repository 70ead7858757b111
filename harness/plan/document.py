"""The JSON documents of a plan: rows by strategy and number of ranks, and what a search takes; per rank, in
bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.forms.terms import Term
from harness.plan import step_time
from harness.plan.alternatives import CHUNKED, RELIEFS
from harness.plan.answer import Answer, trust_in_answers, trust_of
from harness.plan.prediction import Prediction
from harness.plan.search import EXPERTS

SPEED = (
    "step_seconds", "exposed_seconds", "tokens_per_second_per_gpu", "tokens_per_second_between",
    "model_flops_utilization",
)  # fmt: skip
"""Of a speed, under the same names."""
FIGURES = (*SPEED, "computing_seconds", "communication_seconds")


def document(found: Sequence[Answer]) -> dict[str, Any]:
    """What `harness estimate --json` prints."""
    asked = max((answer.question for answer in found), key=lambda question: question.gpus)
    experiment, device, fabric = asked.experiment, asked.device, asked.network
    rows = [row for answer in found for row in answer.rows]
    trust = trust_in_answers(found, rows)
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
            "attention": step_time.attention_kernel(asked.model, experiment.model),
            "preset": experiment.runtime.preset,
        },
        "ranks_per_node": asked.gpus_per_node,
        "gpu": device and {"name": device.name, "memory_bytes": device.memory_bytes, "source": device.source},
        "fabric": fabric and {"name": fabric.name, "source": fabric.source, "assumed": fabric.assumed},
        "remarks": list(dict.fromkeys(remark for answer in found for remark in answer.question.remarks)),
        "rows": [_row(row) for row in rows],
        "alternatives": [
            {**one.as_json(), "instead_of_ranks": answer.question.gpus, "command": answer.command(one)}
            for answer in found
            for one in answer.instead
        ],
        "trust": trust.as_json() if trust else None,
        "answers": [recommendation(answer) for answer in found if answer.found is not None],
    }


def recommendation(answer: Answer) -> dict[str, Any]:
    """What `harness recommend --json` prints: of a search on one number of GPUs."""
    question, found, bound = answer.question, answer.found, answer.communication_bound
    assert found is not None
    device, network = question.device, question.network
    assert device is not None
    chunked, trust = answer.chunked, trust_of(answer.best[:1])
    return {
        "model": question.model.name,
        "parameters": question.model.parameters,
        "gpus": question.gpus,
        "gpus_per_node": question.gpus_per_node,
        "gpu": device.name,
        "fabric": network.name if network else None,
        "fabric_assumed": bool(network and network.assumed),
        "tokens_per_step": question.tokens_per_step if question.tokens else None,
        "sequence_length": question.sequence_length,
        "precision": question.job.training.precision,
        "preset": question.preset,
        "other_preset": {"preset": answer.other_preset, "best": _choice(answer.other_best)},
        "chunked_loss": {**RELIEFS[CHUNKED], "best": _choice(chunked)} if chunked else None,
        "remarks": list(question.remarks),
        "with_room": _choice(found.with_room),
        "all_steps": answer.whole,
        "fewest_gpus": answer.fewest and {"gpus": answer.fewest.world_size, "best": _choice(answer.fewest)},
        "best": [_choice(one) for one in answer.best],
        "fitting": [_choice(one) for one in found.fitting],
        "not_chosen": [
            {"backend": one.label, "fits": one.fits, "reason": why}
            for one, why in found.rejected(answer.best)
        ],
        "left_out": found.left_out,
        "data_parallel_is_right": EXPERTS not in found.left_out
        and any(not one.planned.mesh.shares_samples for one in answer.best[:1]),
        "advice": bound and {"case": "communication-bound", "figures": bound},
        "uncertain": [f"{what}: {why}" for what, why in answer.uncertain],
        "alternatives": [{**one.as_json(), "command": answer.command(one)} for one in answer.instead],
        "trust": trust.as_json() if trust else None,
        "commands": answer.commands,
    }


def _choice(one: Prediction | None) -> dict[str, Any] | None:
    """A split of the batch under a strategy; of a mixture of experts, of which states alone are known, with
    None for the rest."""
    if one is None:
        return None
    memory, speed, scenario = one.most_memory, one.speed, one.planned
    return {
        "backend": one.label,
        "micro_batch_size": scenario.micro_batch_size,
        "accumulation_steps": scenario.accumulation_steps,
        "activation_checkpointing": one.checkpointing,
        "offload": one.offload,
        "shard_size": scenario.options.get("shard_size"),
        "state_bytes": one.held_beside_activations,
        "peak_bytes": one.memory and one.memory.peak_bytes,
        "peak_bytes_between": one.peak_bytes_between,
        "device_bytes": memory and memory.device_bytes,
        "margin_bytes": one.margin_bytes if memory else None,
        "tight": one.is_tight if memory else None,
        "host_bytes_per_node": one.host_bytes_per_node,
        "decisive_moment": memory and memory.decisive.name,
        **{name: getattr(speed, name) if speed else None for name in SPEED},
        "gpu_hours_per_billion_tokens": speed and step_time.gpu_hours_per_billion_tokens(speed),
        "kilowatt_hours_per_billion_tokens": speed
        and step_time.kilowatt_hours_per_billion_tokens(speed, one.world_size),
    }


def _row(row: Prediction) -> dict[str, Any]:
    scenario, memory, verdict, speed = row.scenario, row.memory, row.verdict, row.speed
    return {
        "backend": row.label,
        "world_size": row.world_size,
        "unsupported": row.unsupported,
        "micro_batch_size": scenario and scenario.micro_batch_size,
        "accumulation_steps": scenario and scenario.accumulation_steps,
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
        "peak_bytes": memory and memory.peak_bytes,
        "decisive_moment": memory and memory.decisive.name,
        "moments": memory and {moment.name: moment.kinds for moment in memory.moments},
        "device_bytes": memory and memory.device_bytes,
        "host_bytes_per_node": memory and memory.host_bytes_per_node,
        "file_bytes_per_node": None,  # of offload to files, which is out
        "memory_unknown": row.memory_unknown,
        "peak_bytes_between": row.peak_bytes_between,
        "fits": verdict and verdict.fits,
        "verdict": verdict and verdict.said,
        "margin_bytes": verdict and verdict.margin_bytes,
        "sent_bytes_per_step": _rounded(None if row.unsupported else row.sent_bytes),
        "sent_bytes_between_nodes_per_step": _rounded(None if row.unsupported else row.between_bytes),
        "textbook_sent_bytes_per_step": _rounded(row.textbook_sent_bytes),
        "bubble": row.bubble,
        "collectives": [
            {
                **{name: getattr(line.collective, name) for name in ("term", "phase", "op", "dtype", "role")},
                "group_size": line.group_size,
                "calls": line.collective.calls,
                "payload_bytes": line.collective.payload_bytes,
                "sent_bytes": round(line.sent_bytes),
                "between_nodes_bytes": round(line.between_bytes),
            }
            for line in row.traffic
        ],
        **{name: getattr(speed, name) if speed else None for name in FIGURES},
        "hours_per_billion_tokens": speed and step_time.gpu_hours_per_billion_tokens(speed) / row.world_size,
        "kilowatt_hours_per_billion_tokens": speed
        and step_time.kilowatt_hours_per_billion_tokens(speed, row.world_size),
        "speed_unknown": row.speed_unknown,
        "formulae": formulae(row),
    }


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def formulae(row: Prediction) -> list[dict[str, Any]]:
    """Every line behind a row: quantity, value, formula and source."""
    lines: list[dict[str, Any]] = []
    if row.memory is not None:
        moment = row.memory.decisive
        lines += [_term(f"memory, {moment.name}", term) for term in moment.terms]
        lines += [_term("memory beside the allocator", term) for term in row.memory.overhead]
    for line in row.traffic:
        one = line.collective
        what = f"sent, {one.phase}: {one.term} ({one.op}, {one.dtype})"
        lines.append(_line(what, line.formula, line.source, bytes=round(line.sent_bytes)))
    if row.speed is not None:
        for name, terms in (("computing", row.speed.computing), ("communication", row.speed.communication)):
            lines += [
                _line(f"{name}: {term.name}", term.formula, term.source, seconds=term.seconds)
                for term in terms
            ]
    return lines


def _term(what: str, term: Term) -> dict[str, Any]:
    return _line(f"{what}: {term.kind}, {term.name}", term.formula, term.source, bytes=term.bytes)


def _line(quantity: str, formula: str, source: str, **value: float) -> dict[str, Any]:
    return {"quantity": quantity, **value, "formula": formula, "source": source}
