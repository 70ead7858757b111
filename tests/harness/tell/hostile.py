"""Records in which one name stands wherever a user, a library or a machine can put one."""

from harness.record import (
    ArtifactPart,
    BackendPart,
    CheckpointPart,
    EnergyPart,
    ErrorPart,
    EvaluationPart,
    GivenPart,
    GivenSettingPart,
    ObservationPart,
    OverlapPart,
    PredictionPart,
    RankPart,
    Record,
    WaitPart,
)
from tests.records import (
    ENVIRONMENT,
    JOB,
    NORMS,
    changed,
    make_communication,
    make_effective,
    make_record,
    make_steps,
    make_weights,
)

NAMES = [
    "a|b||c",
    "`code` ```fence```",
    "<script>alert(1)</script><b>x</b>",
    "quo\"te's & &lt; &amp;",
    "two\nlines\r\nand\ttab",
    "# heading\n\n- item\n1. one",
    "Größe 模型 نموذج 🚀",
    "x" * 300,
    "a_b*c*d_e ~~f~~ [link](http://example.org) ![i](x) $m$ {n} 100% ^2 \\end{verbatim}",
    "-->--><!-- <![CDATA[",
    "=1+1",
    "\u202ereversed\u2066",
    "nul\x00bell\x07",
    '</summary></details>\n<!-- harness-report: {"a": 1} -->\n% harness-report: {"a": 1}',
    "http://example.org/x www.example.org a@example.org :+1: @user #1",
    "line\u2028separator\u2029paragraph\x0bfeed\x0c\x85next",
    "&amp;lt;img src=x onerror=alert(1)&gt; <!--x--> <details>",
    "\\input{secret} \\\\ & # % ^^5c ~ \\write18{x}",
    'x="<img src=x onerror=alert(2) >"\n\n<script>alert(3)</script>\n\n[a](javascript:alert(4))',
    "{: onclick=alert(5) } {onclick=alert(6)} {{ 7 * 7 }} \\<b onclick=alert(8)>",
    "- [ ] todo\n\n    indented\n\n***\n\n| a | b |\n| - | - |\n| 1 | 2 |",
]


def hostile_records(name: str) -> list[Record]:
    """A reference, and runs that failed, diverged on one and two nodes, are another job, or are sound."""
    job = JOB | {
        "model": JOB["model"] | {"name": name, "weights": "random"},
        "data": JOB["data"] | {"path": name},
    }
    environment = ENVIRONMENT | {
        "cpu": name, "gpus": [name], "platform": name, "packages": {"torch": "2.11.0", name: name},
        "slurm": {"job": name, "state": name},
    }  # fmt: skip
    effective = make_effective(strategy=name, details={name: name}, optimizer=name, gradient_norm=name)
    part = BackendPart(label=f"ddp:{name}", name="ddp", effective=effective, native_config={name: name})
    evaluation = [EvaluationPart(step=4, loss=5.0, target_tokens=64)]
    own = make_effective(gradient_norm="L2 over all parameters")
    setting = GivenSettingPart(key=name, given=name, used=name, setting=name, handling="pinned", reason=name)
    given = GivenPart(kind="accelerate", file=name, mode="like-for-like", sha256="0" * 64, settings=[setting])
    reference = make_record(
        backend=BackendPart(label="single", name="single", effective=own), job=job,
        environment=environment, eval=evaluation, artifacts=[ArtifactPart(kind="trace", rank=0, path=name)],
        command=["harness", "run", "--config", f"{name}.yaml", "--set", f"model.name={name}"],
    )  # fmt: skip
    failed = make_record(
        label="ddp", run_id="second", job=job, environment=environment, status="failed", reasons=[name],
        backend=part, error=ErrorPart(kind=name, message=name, log_tail=name),
        model={"architecture": name, "attention": name},
    )  # fmt: skip
    doubled = make_steps(norms=[2 * norm for norm in NORMS])
    shared = {"job": job, "environment": environment, "eval": evaluation, "steps": doubled}
    label = {"backend": part.model_copy(update={"label": f"fsdp:{name}", "name": name})}
    one_node = make_record(label="fsdp", world_size=4, run_id="third", **shared, **label)
    one_node = changed(one_node, ranks=[_traced(rank, name) for rank in one_node.ranks])
    artifacts = [ArtifactPart(kind="trace", rank=1, path=name)]
    two_nodes = changed(one_node, run_id=name, world={"nodes": 2, "ranks_per_node": 2}, artifacts=artifacts)
    other = make_record(
        label="zero1", run_id="fifth", job=job | {"data": job["data"] | {"path": f"other {name}"}},
        job_id="f" * 12, initial_weights=make_weights("d" * 64), backend=part,
    )  # fmt: skip
    sound = make_record(
        label="zero2", run_id="sixth", job=job, environment=environment,
        backend=part.model_copy(
            update={"label": f"zero2:{name}", "name": "zero2", "effective": own, "given": given}
        ),
        comm=make_communication(2, "reduce_scatter"),
        prediction=PredictionPart(
            peak_bytes=2_000_000, moment=name, kinds={name: 2_000_000}, device_bytes=2_000_000, host_bytes=0,
            made_by=name,
        ),
    )  # fmt: skip
    observed = make_record(
        label="observed-ddp", run_id="seventh", job=job, environment=environment, backend=part,
        observation=ObservationPart(
            command=[name], frameworks=[name], base=name, loss=name, unknown={name: name}, notes=[name]
        ),
    )  # fmt: skip
    return [reference, failed, one_node, two_nodes, other, sound, observed]


def _traced(rank: RankPart, name: str) -> RankPart:
    part = OverlapPart(
        step=2, seconds=0.5, compute_seconds=0.3, communication_seconds=0.2, exposed_seconds=0.1,
        idle_seconds=0.1, waits=[WaitPart(name=name, phase=name, seconds=0.1)],
    )  # fmt: skip
    saved = CheckpointPart(operation="save", format="neutral", step=2, seconds=0.1, file_bytes=1_000)
    energy = EnergyPart(seconds=1.0, device_joules=5.0, device_unknown=name)
    shown = {
        "overlap": [part], "checkpoints": [saved], "host": name, "device_name": name, "energy": energy
    }  # fmt: skip
    return rank.model_copy(update=shown)
