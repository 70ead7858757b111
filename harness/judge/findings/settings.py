"""Settings in force that differ from the reference's, or between backends, and change the mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.backends.library_facts import fact
from harness.judge.effective import GROUPS, SettingDifference, reduce_dtypes
from harness.judge.findings.finding import Finding, Kind
from harness.judge.noise import is_repetition
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record import Record
from harness.record.together import batch_statistics

KINDS = (
    Kind(
        id="clipping-differs",
        title="Gradient clipping differs",
        cause=f"DeepSpeed {fact('zero-clips-by-default').first} and later clip at 1.0 unless configured "
        "otherwise, earlier ones do not; torch and Accelerate clip only on request.",
        confirm="Compare `gradient_norm` (before clipping) with `applied_gradient_norm` (what the optimizer "
        "received) in the first steps. If neither reached the threshold, see the effective configuration.",
        fix='Set it explicitly: DeepSpeed `"gradient_clipping": 0.0` for none; torch `clip_grad_norm_`; '
        "Accelerate's DeepSpeedPlugin `gradient_clipping=`.",
    ),
    Kind(
        id="master-dtype-differs",
        title="Dtype of masters or optimizer states differs",
        cause="One backend updates fp32 masters, another updates the low-precision weights directly.",
        confirm="`observed.master_dtypes` and `observed.optimizer_state_dtypes` of the records.",
        fix="FSDP: load the model in fp32 and let the mixed-precision policy cast; DeepSpeed: leave "
        "`bf16_master_weights_and_grads` off. Accelerate 1.0 and later upcasts only with `mixed_precision`.",
    ),
    Kind(
        id="reduce-dtype-differs",
        title="Gradients are reduced in different dtypes",
        cause="Defaults differ: DeepSpeed reduces in the model's dtype, FSDP in the parameter dtype of its "
        "policy, DDP under autocast in fp32.",
        confirm="See the dtype column of the communication table, and `effective.reduce_dtype`.",
        fix='DeepSpeed `"communication_data_type": "fp32"`; FSDP `reduce_dtype=torch.float32`; DDP: no '
        "compression hook."
        " Accelerate: the same in `FullyShardedDataParallelPlugin(mixed_precision_policy=...)` or in the "
        "DeepSpeed file.",
    ),
    Kind(
        id="optimizer-differs",
        title="Optimizer hyperparameters differ",
        cause="Another optimizer, other betas, epsilon or weight decay, weight decay on other parameters "
        "(biases, norms), groups whose parameters were swapped, or parameters without an optimizer.",
        confirm="`effective.optimizer`, `observed.optimizer_groups` and `observed.parameters_left_out` of "
        "the records; the observed ones cover every torch optimizer that steps, whoever built it.",
        fix="Pass every constant explicitly; decide decay groups on the unsharded model, since shards lose "
        "their shapes and FSDP1 with `use_orig_params=False` its groups."
        " Accelerate: prepare your own optimizer instead of `DummyOptim`.",
    ),
    Kind(
        id="strategy-differs",
        title="Effective strategy differs from the requested one",
        cause="The library fell back: FSDP1 takes NO_SHARD on one rank; Accelerate on a CPU runs DDP or "
        "single processes when given an FSDP plugin.",
        confirm="`effective.strategy` against `effective.requested_strategy`.",
        fix="Run on more ranks; check `accelerator.distributed_type` and the type of the prepared model.",
    ),
    Kind(
        id="step-environment-differs",
        title="Activation checkpointing, attention kernel, compile, TF32 or NCCL differ",
        cause="One run uses different kernels, which changes speed and rounding (torch.compile fuses "
        "operations and reorders sums, TF32 rounds the factors of matrix products to 10 bits), "
        "recomputes activations, which changes speed and memory, or has NCCL take other algorithms, which "
        "add in another order.",
        confirm="Compare `observed` and the NCCL variables in `environment.variables` of the records. "
        "`NVIDIA_TF32_OVERRIDE=0` turns TF32 off whatever the job says.",
        fix="Use the same settings for all backends.",
    ),
    Kind(
        id="replicas-differ",
        title="Ranks that should hold equal weights do not",
        cause="Gradients are not reduced across replicas, or weights of one rank are stale.",
        confirm="`ranks[].final_digest` and `ranks[].probe_loss` of the record differ between ranks.",
        fix="FSDP hybrid: check the device mesh and that the replicate group is reduced; DDP: every rank "
        "must step; DeepSpeed: do not touch weights between its steps."
        " Accelerate: step the prepared optimizer on every rank.",
    ),
    Kind(
        id="skipped-steps",
        title="Optimizer steps were skipped",
        cause="A loss scaler silently skipped updates because gradients were NaN or infinite.",
        confirm="Steps without a gradient norm in the record.",
        fix="A few at the start: the scaler is finding its scale; lower `training.initial_loss_scale`. Many: "
        "use bf16.",
    ),
)

BY_SETTING = {
    "gradient clipping": "clipping-differs",
    "norm that clips": "clipping-differs",
    "optimizer": "optimizer-differs",
    "optimizer constants": "optimizer-differs",
    GROUPS: "optimizer-differs",
    "parameters without optimizer": "optimizer-differs",
    "frozen parameters": "optimizer-differs",
    "dtype of masters": "master-dtype-differs",
    "dtype of optimizer states": "master-dtype-differs",
    "attention kernel": "step-environment-differs",
    "TF32": "step-environment-differs",
    "settings of NCCL": "step-environment-differs",
    "activation checkpointing": "step-environment-differs",
    "compiled": "step-environment-differs",
}
PROBE_TOLERANCE = 1e-6
"""Relative. Equal weights give equal losses up to the choice of kernels on another device."""


def find(runs: Runs) -> list[Finding]:
    """Differences from the reference, then between backends, then between the ranks of one run."""
    trained = [row for row in runs.rows if row.record.status in ("ok", "diverged")]
    found = []
    for row in trained:
        if is_repetition(row.record):
            continue
        for difference in row.judgement.settings:
            kind = BY_SETTING.get(difference.setting)
            if kind is not None:
                found.append(
                    _about(
                        row,
                        kind,
                        _message(difference),
                        {"reference": difference.reference, "given": difference.given},
                    )
                )
        found += _strategy(row) + _skipped(row)
    return found + _reduction(trained) + [f for row in trained for f in _replicas(row)]


def _message(difference: SettingDifference) -> str:
    """Both values; of constants by parameter, those of the first and how many more have others."""
    if difference.setting == GROUPS:
        name, *others = difference.given
        given, reference = difference.given[name], difference.reference[name]
        more = f", and {len(others)} more parameters have constants of another group" if others else ""
        return f"{difference.differs}: {name} has {given} against {reference} in the reference{more}"
    given, reference = difference.texts
    return f"{difference.differs}: {given} against {reference} in the reference"


def _strategy(row: Row) -> list[Finding]:
    effective = row.record.backend.effective
    if effective is None:
        return []
    asked, runs = effective.requested_strategy, effective.strategy
    if asked is None or asked == runs:
        return []
    return [
        _about(
            row,
            "strategy-differs",
            f"runs {runs}, although {asked} was requested",
            {"requested": asked, "effective": runs},
        )
    ]


def _skipped(row: Row) -> list[Finding]:
    skipped, steps = row.record.skipped_steps, len(row.record.steps)
    if not skipped:
        return []
    return [
        _about(
            row,
            "skipped-steps",
            f"the loss scaler skipped {skipped} of {steps} optimizer steps",
            {"skipped": skipped, "steps": steps},
        )
    ]


def _reduction(rows: Sequence[Row]) -> list[Finding]:
    """Runs that reduce in another dtype although others of the same job use fp32."""
    found = []
    for job_id in dict.fromkeys(row.record.job_id for row in rows):
        dtypes = [(row, reduce_dtypes(row.record)) for row in rows if row.record.job_id == job_id]
        if any(given == ["float32"] for _, given in dtypes):
            found += [
                _about(
                    row,
                    "reduce-dtype-differs",
                    f"gradients are reduced in {', '.join(given)}, in other runs in float32",
                    {"given": given, "others": ["float32"]},
                )
                for row, given in dtypes
                if given and given != ["float32"]
            ]
    return found


def _replicas(row: Row) -> list[Finding]:
    ranks = row.record.ranks
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.final_digest is not None:
            groups.setdefault(rank.final_digest, []).append(rank.rank)
    if len(groups) > 1:
        cut = " against ".join("ranks " + ", ".join(map(str, group)) for group in groups.values())
        return [
            _about(
                row,
                "replicas-differ",
                f"replicas diverge: final weights of {cut}",
                {"groups": list(groups.values())},
            )
        ]
    losses = _probe_losses(row.record)
    if batch_statistics(row.record):
        return []  # each rank evaluates with running statistics of its own
    if losses and max(losses.values()) - min(losses.values()) > PROBE_TOLERANCE * abs(max(losses.values())):
        return [
            _about(
                row,
                "replicas-differ",
                "ranks compute different losses from the same batch after training: their compute weights "
                "differ although the masters agree",
                {"probe_losses": losses},
            )
        ]
    return []


def _probe_losses(record: Record) -> dict[int, float]:
    """By data rank, the loss of one batch that is the same for all of them; parts of it added up."""
    mesh, found = record.world.mesh, dict[int, float]()
    for rank in record.ranks:
        if rank.probe_loss is not None and mesh.counts_loss(rank.rank):
            data_rank = mesh.data_rank(rank.rank)
            found[data_rank] = found.get(data_rank, 0.0) + rank.probe_loss
    return found


def _about(row: Row, kind: str, text: str, values: dict[str, Any]) -> Finding:
    return Finding(
        id=kind,
        about=row.cell,
        text=text,
        values=values,
    )
