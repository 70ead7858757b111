"""A plan refuses what a run refuses before its ranks build anything: backends, their options and settings."""

from __future__ import annotations

import pytest

from harness.backends import registry
from harness.backends.base import World
from harness.backends.refusals import Unsupported
from harness.backends.zero import backend as of_zero
from harness.job.config import load_experiment
from harness.job.pairs import why_refused
from harness.plan.models import load_model
from harness.plan.scenario import why_not_planned

RANKS = 4
OPTIONS = (
    "zero0:offload=optimizer", "zero1:offload=optimizer", "zero1:adam=deepspeed", "zero1:offload=cpu",
    "zero2:adam=deepspeed,offload=optimizer", "zero3:adam=deepspeed,offload=cpu",
    "zero3:hpz=2", "zero3:hpz=3", "ulysses-zero3:hpz=2", "autotp-zero3:hpz=2",
    "fsdp:reshard=2", "fsdp:reshard=3", "fsdp1:offload=cpu", "fsdp:offload=cpu", "fsdp-hybrid:shard_size=3",
    "fsdp1:offload=cpu,sync_each_batch=true", "fsdp-tp:tensor=3", "cp:sequence=3", "pp:stages=3",
)  # fmt: skip
SETTINGS = (
    "training.precision=fp32", "training.precision=fp8", "optimizer.kind=adam", "optimizer.kind=sgd",
    "optimizer.kind=adamw-8bit", "optimizer.kind=adamw-8bit-bnb", "optimizer.kind=muon",
    "data.document_attention=within", "model.compile=block", "model.compile=model", "loss.chunk_tokens=16",
    "training.activation_checkpointing=selective", "evaluation.answer_tokens=8", "adapter.kind=lora",
    "optimizer.groups=[{parameters: '*norm*', learning_rate: 0.1}]",
)  # fmt: skip
ASKED_WITH = {
    "evaluation.answer_tokens=8": ("evaluation.every_steps=2", "data.source=squad", "data.path=squad.json")
}
"""Settings that a job must have beside one of these."""


@pytest.fixture
def _with_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which extensions of DeepSpeed this machine can build is no matter of the options."""
    monkeypatch.setattr(of_zero, "unmet_build", lambda name: [])


@pytest.mark.usefixtures("_with_compilers")
@pytest.mark.parametrize("label", [*registry.BUILT_IN, *OPTIONS])
def test_a_plan_refuses_what_a_run_refuses(label: str) -> None:
    model, world = load_model("llama-3.2-1b"), World.planned(RANKS, RANKS, "cpu")
    try:
        backend = registry.create(label)
    except Unsupported as missing:  # its library is not installed, or another version
        pytest.skip(str(missing))
    unmet = registry.unmet_requirements(backend, world)
    unlike = {}
    for setting in SETTINGS:
        job = load_experiment(None, (*ASKED_WITH.get(setting, ()), setting)).job()
        refused, planned = why_refused(label, RANKS, job), why_not_planned(label, job, world, 4, model)
        if (unmet or refused) and not planned:
            unlike[setting] = unmet or refused
        if refused and not unmet and planned != refused:
            unlike[setting] = [refused, planned]
    assert not unlike
