"""What an offloaded run moves to and from its host."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from harness.forms.families import model_states
from harness.forms.fsdp import fsdp2
from harness.forms.layout import Layout, Tensor
from harness.forms.network import host_link_bytes
from harness.forms.workload import Workload
from tests.harness.forms.layouts import LLAMA_SMALL, layout_of
from tests.harness.forms.test_model_states import workload

RANKS = 2
TRAINED = "q_proj"


def adapted(dtype: str = "float32") -> Layout:
    """The small Llama of which queries alone are trained; the rest lies there in `dtype`."""
    plain = layout_of(LLAMA_SMALL)
    held = [t if TRAINED in t.name else Tensor(t.name, t.shape, dtype) for t in plain.parameters]
    frozen = frozenset(tensor.name for tensor in held if TRAINED not in tensor.name)
    return replace(plain, parameters=tuple(held), frozen=frozen, without_gradient=frozenset())


def asked(backend: str, layout: Layout | None = None, ranks: int = RANKS, **changes: Any) -> Workload:
    found = workload(backend, ranks, LLAMA_SMALL, device="cuda", transport="nccl", **changes)
    return replace(found, layout=layout or found.layout)


def moved(asked: Workload) -> float:
    return host_link_bytes(asked, model_states(asked))


def held(asked: Workload, kind: str) -> int:
    return model_states(asked).kinds(host=True).get(kind, 0)


@pytest.fixture
def one_of_two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "micro_steps", "reshards"),
    [("float32", 1, True), ("bfloat16", 2, True), ("bfloat16", 2, False)],
)
def test_fsdp2_reads_what_its_closed_form_says(
    one_of_two_ranks: None, monkeypatch: pytest.MonkeyPatch, dtype: str, micro_steps: int, reshards: bool
) -> None:
    """Counted where torch copies rows to the device, of which a CPU makes nothing."""
    read = 0
    plain = vars(FSDPParam)["all_gather_inputs"].fget

    def counted(parameter: FSDPParam) -> list[torch.Tensor]:
        nonlocal read
        if parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED:
            read += parameter._sharded_param_data.nbytes
        found: list[torch.Tensor] = plain(parameter)
        return found

    monkeypatch.setattr(FSDPParam, "all_gather_inputs", property(counted))
    config: dict[str, Any] = {key: value for key, value in LLAMA_SMALL.items() if key != "model_type"}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    for name, parameter in model.named_parameters():
        if TRAINED not in name:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(getattr(torch, dtype))
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (RANKS,)),
        "reshard_after_forward": reshards,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.model.layers:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    for micro_step in range(micro_steps):
        model.set_requires_gradient_sync(micro_step == micro_steps - 1)
        tokens = torch.zeros((1, 8), dtype=torch.long)
        model(input_ids=tokens, labels=tokens).loss.backward()

    backend = "fsdp" if reshards else "fsdp-grad-op"
    job = asked(backend, adapted(dtype), accumulation_steps=micro_steps, options={"offload": "cpu"})
    assert read == fsdp2.host_reads(job)


@pytest.mark.parametrize("backend", ["fsdp", "fsdp1"])
def test_fsdp_reads_a_frozen_base_in_each_pass_and_sends_gradients_of_what_is_trained(backend: str) -> None:
    job = asked(backend, adapted(), options={"offload": "cpu"})
    weights, gradients = held(job, "weights"), held(job, "gradients")
    assert moved(job) == 2 * weights + gradients
    assert moved(replace(job, accumulation_steps=3)) == 6 * weights + gradients
    assert moved(asked(backend, adapted())) == 0


def test_fsdp_reads_in_the_dtype_in_which_weights_lie_there() -> None:
    layouts = adapted("float32"), adapted("bfloat16")
    wide, narrow = (asked("fsdp", layout, options={"offload": "cpu"}) for layout in layouts)
    frozen = sum(t.bytes for t in model_states(wide).terms if t.name == "frozen weights")
    assert frozen > 0
    assert moved(wide) - moved(narrow) == pytest.approx(2 * frozen / 2)


def test_fsdp1_reads_also_what_it_keeps_gathered() -> None:
    """After each pass its parameters point to the host again."""
    kept = asked("fsdp1-grad-op", options={"offload": "cpu"})
    assert moved(kept) == moved(asked("fsdp1", options={"offload": "cpu"}))


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_zero3_reads_a_frozen_base_at_each_gather(ranks: int) -> None:
    job = asked("zero3", adapted(), ranks, options={"offload": "cpu"})
    weights = sum(-(-t.numel // ranks) for t in job.layout.parameters) * 2
    trained = sum(-(-t.numel // ranks) for t in job.layout.trained)
    assert moved(job) == pytest.approx(2 * weights + trained * (4 + 2 * 4))  # fp32 down, then up and down
    base = asked("zero3", adapted(), ranks, options={"offload": "optimizer"})
    assert moved(base) == pytest.approx(trained * (4 + 2 * 4 + 2))  # updated weights up, no frozen ones


def test_zero3_without_a_closed_form_of_gathers_reads_in_each_pass() -> None:
    job = asked("zero3", adapted(), activation_checkpointing=True, options={"offload": "cpu"})
    trained = sum(-(-t.numel // RANKS) for t in job.layout.trained)
    assert moved(job) == 3 * held(job, "weights") + trained * (4 + 2 * 4)


def test_zero2_adds_up_on_the_host_where_gradients_stay_narrow() -> None:
    """Like for like micro-steps add up in fp32 on the device; by its defaults DeepSpeed does on the host."""
    for preset, further in (("like-for-like", 0), ("library-defaults", 1)):
        job = asked("zero2", adapted(), preset=preset, options={"offload": "optimizer"})
        one, three = (replace(job, accumulation_steps=count) for count in (1, 3))
        kept = sum(t.bytes for t in model_states(three).terms if t.name.startswith("accumulated"))
        assert bool(kept) is bool(further)
        assert moved(three) - moved(one) == 5 * kept  # down three times, up twice
    trained = one.layout.trained_count / RANKS
    assert moved(one) == pytest.approx(trained * (4 + 2))
