"""Of a mixture of experts only states are known, and they say what leaves room for the rest."""

from __future__ import annotations

from harness.job.experiment import Experiment
from harness.plan.alternatives import MORE_GPUS, OFFLOAD
from harness.plan.answer import answers
from harness.plan.hardware import load_hardware
from harness.plan.models import load_model, why_uneven
from harness.plan.question import ask as question
from harness.plan.text import answer_lines

PARAMETERS = 46_702_792_704
LIBRARIES = Experiment.model_validate(
    {"runtime": {"preset": "library-defaults"}, "training": {"precision": "bf16-mixed"}}
)


def asked(gpus: int, *labels: str):
    return question(
        load_model("mixtral-8x7b"), LIBRARIES, backends=list(labels), world_sizes=[gpus],
        ranks_per_node=8, device=load_hardware().device("H100-80"),
    )  # fmt: skip


def test_what_leaves_room_is_offered_where_states_do_not_fit() -> None:
    few = asked(8, "zero3", "fsdp", "fsdp-grad-op")
    (answer,) = answers(few)
    by_name = {one.name: one for one in answer.instead}
    more, offload = by_name[MORE_GPUS], by_name[OFFLOAD]
    # 16 bytes a parameter over 16 ranks: 46.7 of 84.9 GB; over 8 they are 93.4. Under fsdp 8 ranks hold them.
    assert (more.label, more.world_size) == ("zero3", 16)
    assert abs(more.needed_bytes / PARAMETERS - 1) < 1e-3
    assert offload.host_bytes_per_node > 16 * PARAMETERS * 0.999
    # Whole weights in bf16 are 93.4 GB, which fsdp-grad-op keeps after the forward pass.
    assert all("grad-op" not in one.label for one in answer.instead if one.is_roomy)
    lines = answer_lines([answer])
    assert "nothing fits; more GPUs: zero3 on 16 ranks" in " ".join(lines[:3])
    assert any(line.startswith("GB per rank") for line in lines)


def test_states_that_leave_room_call_for_nothing_else() -> None:
    many = asked(16, "zero3", "fsdp", "fsdp-grad-op", "zero2")
    (answer,) = answers(many)
    assert answer.instead == ()
    text = " ".join(answer_lines([answer]))
    assert "fsdp holds 91.8 GB of states and zero3 46.7: FSDP2 cuts the experts" in text


def test_even_states_are_not_explained() -> None:
    assert why_uneven({"fsdp": 10, "zero3": 10}, {"num_local_experts": 8}) is None
    assert why_uneven({"fsdp": 10}, {"num_local_experts": 8}) is None
    assert "no more than 8 ranks" in (why_uneven({"fsdp": 20, "zero3": 10}, {"num_local_experts": 8}) or "")
