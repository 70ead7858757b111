"""The attention kernel of a plan, and its seconds."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.published.programs import Program
from harness.backends.tensor.backend import cut_layers
from harness.errors import HarnessError
from harness.forms.layout import DTYPE_BYTES
from harness.forms.tensor import LOGITS
from harness.job.job import Job, ModelSection
from harness.plan import step_time
from harness.plan.hardware import Device, default_constants
from harness.plan.models import ARCHITECTURES, load_model
from tests.harness.plan.plans import A100, INFINIBAND, llama, row, scenario
from tests.records import changed


def predicted(backend: str, world_size: int, **changes: object) -> step_time.SpeedPrediction:
    return step_time.predict_speed(scenario(backend, world_size, **changes))


def seconds_of(name: str, speed: step_time.SpeedPrediction) -> float:
    return sum(term.seconds for term in speed.computing if term.name == name)


def test_a_step_is_computing_and_exposed_communication() -> None:
    speed = predicted("fsdp", 8)
    assert speed.step_seconds == pytest.approx(speed.computing_seconds + speed.exposed_seconds)
    assert 0 < speed.exposed_seconds < speed.communication_seconds
    assert speed.tokens_per_second_per_gpu == pytest.approx(2 * 4096 / speed.step_seconds)


def test_every_term_has_a_formula_and_a_source_and_one_rank_communicates_nothing() -> None:
    speed, alone = predicted("zero2", 16), predicted("single", 1)
    assert all(term.formula and term.source for term in (*speed.computing, *speed.communication))
    assert (alone.communication, alone.exposed_seconds) == ((), 0)


def test_matrix_products_take_six_flops_per_parameter_and_token_at_the_sustained_rate() -> None:
    constants = replace(default_constants(A100), kernel_seconds=0.0)
    device = replace(A100, memory_bandwidth=1e18)
    speed = step_time.predict_speed(scenario("single", 1, device=device), constants)
    norms = 65 * 4096
    flops = 6 * (llama().multiplying_parameters - norms) * 2 * 4096
    rate = 312e12 * constants.matrix_share * constants.sustained_share
    assert seconds_of("matrix products", speed) == pytest.approx(flops / rate, rel=1e-4)


@pytest.mark.parametrize(("label", "width"), [("fsdp", 2), ("ddp", 4)])
def test_dropout_before_adapters_reads_and_writes_what_they_take_in(label: str, width: int) -> None:
    """`width`: bytes of what is dropped out, which is fp32 where adapters are, under autocast."""
    plain = scenario(label, 8)

    def elementwise(dropout: float) -> float:
        adapter = {"kind": "lora", "targets": ["q_proj", "v_proj"], "dropout": dropout, "base_dtype": "bf16"}
        job = Job.model_validate({**plain.job.model_dump(mode="json"), "adapter": adapter})
        return seconds_of("elementwise kernels", step_time.predict_speed(replace(plain, job=job)))

    inputs, tokens = 32 * 2 * 4096, 2 * 4096
    moved = 2 * (2 * width + 1) * inputs * tokens  # forward and backward; a mask of a byte
    assert elementwise(0.1) - elementwise(0.0) == pytest.approx(moved / (0.85 * A100.memory_bandwidth))


def test_utilization_of_adapters_counts_no_gradients_of_frozen_weights() -> None:
    """LoRA of rank 8 on queries and values of 32 blocks of width 4,096: 4 N + 6 A + 12 L H Q T a token."""
    plain = scenario("ddp", 8)
    adapter = {"kind": "lora", "rank": 8, "targets": ["q_proj", "v_proj"]}
    job = Job.model_validate({**plain.job.model_dump(mode="json"), "adapter": adapter})
    model = replace(plain.model, config={**plain.model.config, "model_type": "llama"})
    found = step_time.predict_speed(replace(plain, job=job, model=model))
    adapters = 32 * 2 * 2 * 8 * 4096
    flops = 4 * model.multiplying_parameters + 6 * adapters + 12 * 32 * 4096 * 4096
    assert found.model_flops_utilization == pytest.approx(found.tokens_per_second_per_gpu * flops / 312e12)


def test_utilization_counts_the_model_and_not_recomputation() -> None:
    plain, recomputed = (predicted("single", 1, activation_checkpointing=on) for on in (False, True))
    flops = 6 * llama().multiplying_parameters + 12 * 32 * 4096 * 4096
    assert plain.model_flops_utilization == pytest.approx(plain.tokens_per_second_per_gpu * flops / 312e12)
    # The forward pass once more, but for the last product of each block.
    assert 1.2 < recomputed.step_seconds / plain.step_seconds < 4 / 3


def test_thin_products_reach_less_of_the_peak() -> None:
    shares = [
        predicted("single", 1, model=llama(hidden, 8, 4 * hidden)).model_flops_utilization
        for hidden in (512, 1024, 2048, 4096, 8192)
    ]
    assert all(narrow is not None and wide is not None and narrow < wide for narrow, wide in pairwise(shares))


def test_zero_3_like_for_like_exposes_its_gathers_and_fsdp_does_not() -> None:
    fsdp, zero = (predicted(name, 8, preset="like-for-like") for name in ("fsdp", "zero3"))
    gathers = sum(t.seconds for t in zero.communication if "weights gathered" in t.name)
    assert zero.exposed_seconds > gathers
    assert fsdp.exposed_seconds < zero.exposed_seconds / 2


def test_ddp_hides_its_reductions_and_overlap_comm_those_of_zero() -> None:
    assert predicted("ddp", 8).exposed_seconds < predicted("zero2", 8).exposed_seconds / 2
    for backend, given, hides in (("zero2", True, True), ("zero3", False, False), ("zero1", True, True)):
        plain = predicted(backend, 8).exposed_seconds
        other = predicted(backend, 8, options={"overlap_comm": given}).exposed_seconds
        assert (other < plain) == hides, backend


def test_accumulation_spreads_the_reduction_of_ddp_but_not_the_gathers_of_fsdp() -> None:
    for backend, most in (("ddp", 1.01), ("fsdp", 3.0)):
        once, often = (predicted(backend, 16, accumulation_steps=count) for count in (1, 4))
        ratio = often.communication_seconds / once.communication_seconds
        assert (ratio < most) if backend == "ddp" else (2 < ratio < most), backend


def test_a_slower_network_never_makes_a_step_faster() -> None:
    networks = (replace(INFINIBAND, bandwidth_per_gpu=rate) for rate in (25e9, 12.5e9, 2.5e9, 0.25e9))
    steps = [predicted("fsdp", 32, fabric=network).step_seconds for network in networks]
    assert steps == sorted(steps)
    assert steps[-1] > 5 * steps[0]


def test_hybrid_sharding_wins_where_nodes_are_joined_by_a_slow_network() -> None:
    slow = replace(INFINIBAND, bandwidth_per_gpu=1e9)
    hybrid, full = predicted("fsdp-hybrid", 64, shard_size=8, fabric=slow), predicted("fsdp", 64, fabric=slow)
    assert hybrid.step_seconds < full.step_seconds / 1.3


def test_without_a_device_no_time_is_predicted_and_several_nodes_need_a_network() -> None:
    assert step_time.predict_speed(scenario("ddp", 8, device=None)) is None
    with pytest.raises(HarnessError, match=r"2 nodes need a network: name one with --fabric"):
        step_time.predict_speed(scenario("ddp", 16, fabric=None))


def test_contention_adds_a_share_of_what_is_hidden() -> None:
    constants = default_constants(A100)
    shares = (replace(constants, contention=share) for share in (0.0, 0.5))
    ideal, real = (step_time.predict_speed(scenario("fsdp", 8), own) for own in shares)
    hidden = ideal.communication_seconds - ideal.exposed_seconds
    assert real.exposed_seconds == pytest.approx(ideal.exposed_seconds + hidden / 2)


def test_hours_and_energy_follow_from_the_throughput() -> None:
    speed = predicted("fsdp", 16)
    hours = step_time.gpu_hours_per_billion_tokens(speed) / 16
    assert hours * 3600 * 16 * speed.tokens_per_second_per_gpu == pytest.approx(1e9)
    # 16 GPUs of 400 W.
    assert step_time.kilowatt_hours_per_billion_tokens(speed, 16) == pytest.approx(hours * 16 * 0.4)


def test_offload_does_not_update_on_the_device() -> None:
    plain, offloaded = (predicted("zero2", 8, options=options) for options in ({}, {"offload": "optimizer"}))
    update = {t.name: t.seconds for t in offloaded.computing}
    assert "optimizer step" not in update
    assert offloaded.step_seconds > plain.step_seconds


def test_what_is_offloaded_crosses_the_device_s_own_link_to_the_host() -> None:
    def crossing(gb_per_second: float) -> float:
        device = replace(A100, host_link_bandwidth=gb_per_second * 1e9)
        return seconds_of(
            step_time.HOST_LINK, predicted("zero2", 4, options={"offload": "optimizer"}, device=device)
        )

    # Gradients down in fp32 and updated weights up in bf16, at 0.78 of the link's rate.
    assert crossing(32) == pytest.approx(6 * llama().layout.parameter_count / 4 / (0.78 * 32e9), rel=0.01)
    assert crossing(32) == pytest.approx(crossing(450) * 450 / 32)


def test_the_host_updates_as_fast_as_published() -> None:
    """DeepSpeed, pull request 735: 11.6e9 parameters, 56 s with torch's Adam, 8.2 s with DeepSpeed's."""

    def seconds(ranks: int, **options: str) -> float:
        speed = predicted("zero2", ranks, options={"offload": "optimizer", **options})
        return seconds_of(step_time.UPDATE_ON_HOST, speed) * ranks * 11.6e9 / llama().parameters

    assert seconds(1) == pytest.approx(56, rel=0.2)
    assert seconds(1, adam="deepspeed") == pytest.approx(8.2, rel=0.02)
    # Eight ranks share 50 GB/s, where one reaches 20 with torch's passes and 40 with one fused kernel.
    assert seconds(8) == pytest.approx(8 * 20 / 50 * seconds(1))
    assert seconds(8, adam="deepspeed") == pytest.approx(8 * 40 / 50 * seconds(1, adam="deepspeed"))


def test_the_ranks_of_a_node_update_together_as_fast_as_published() -> None:
    """DeepSpeed, issue 6834: about 10 s for 72e9 parameters on four nodes of eight A100."""
    speed = predicted("zero3", 32, options={"offload": "cpu", "adam": "deepspeed"})
    update = seconds_of(step_time.UPDATE_ON_HOST, speed)
    assert update * 72.3e9 / llama().parameters == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("backend", "launches"),
    [
        ("ddp", (32 * 34, 32 * 52)),
        # 32 blocks and the root; 9 modules a block, embedding, last norm, head; 9 tensors a block and 3.
        ("fsdp", (32 * 34 + 33 * 55, 32 * 52 + 33 * 65)),
        ("zero3", (32 * 34 + 291 * 47, 32 * 52 + 291 * 28)),
        ("zero2", (32 * 34 + 291 * 2, 32 * 52 + 291 * 6)),
    ],
)
def test_hooks_of_libraries_count_as_launches(backend: str, launches: tuple[int, int]) -> None:
    assert step_time.host_launches(step_time.Work(scenario(backend, 8))) == launches


def test_a_program_that_wraps_every_layer_has_hooks_at_each_and_on_a_cpu_none_cost_anything() -> None:
    whole = scenario("fsdp1", 8)
    layers = replace(whole, other=Program(wraps_layers=True))
    assert step_time.host_launches(step_time.Work(whole)) == (32 * 34 + 33 * 108, 32 * 52 + 33 * 196)
    assert step_time.host_launches(step_time.Work(layers)) == (32 * 34 + 291 * 108, 32 * 52 + 291 * 196)
    plans = (replace(scenario(name, 2), torch_device="cpu") for name in ("ddp", "zero3"))
    assert {step_time.host_launches(step_time.Work(plan)) for plan in plans} == {
        (32 * 34, 32 * 52)
    }  # calibrated as a whole


def test_short_steps_wait_for_the_host_and_long_ones_do_not() -> None:
    def waited(backend: str, tokens: int) -> float:
        asked = {"model": llama(1024, 24, 2816), "sequence_length": tokens, "micro_batch_size": 1}
        return seconds_of("waiting for the host", predicted(backend, 8, **asked))

    assert waited("zero3", 256) > waited("fsdp", 256) > waited("ddp", 256) > 0
    assert waited("fsdp", 32768) == waited("ddp", 32768) == 0


def test_once_a_step_the_host_handles_each_trained_tensor_unless_the_device_has_work_left() -> None:
    def waited(**changes: object) -> float:
        asked = {"model": llama(1024, 24, 2816), "sequence_length": 256, "micro_batch_size": 1}
        return seconds_of("waiting for the host", predicted("ddp", 8, **asked, **changes))

    speed = predicted("ddp", 8, model=llama(1024, 24, 2816), sequence_length=256, micro_batch_size=1)
    tensors = 24 * 9 + 3
    busy = tensors * step_time.ONCE_SECONDS
    assert speed.step_seconds > busy > 0
    # Of 8 micro-steps each waits for launches, the step once for the tensors.
    one, eight = waited(), waited(accumulation_steps=8)
    assert one < eight < 8 * one


@pytest.mark.parametrize("label", ["fsdp", "fsdp1"])
def test_full_sharding_on_many_gpus_is_a_range_from_all_that_hides_to_nothing(label: str) -> None:
    few, many = (predicted(label, ranks) for ranks in (32, 64))
    assert few.step_seconds_between is None
    fast, slow = many.step_seconds_between
    assert (fast, many.loses_with_scale) == (many.step_seconds, True)
    assert slow == pytest.approx(many.computing_seconds + many.communication_seconds)
    assert slow > fast
    assert predicted("fsdp-hybrid", 64).step_seconds_between is None


def test_a_gpu_that_too_few_measured_has_a_range_of_speeds() -> None:
    plan = scenario("ddp", 8)
    other = replace(plan, device=replace(A100, name="MI300X"))
    fast, slow = step_time.predict_speed(other).step_seconds_between
    assert fast < step_time.predict_speed(other).step_seconds < slow
    least, most = step_time.predict_speed(other).tokens_per_second_between
    assert most / least == pytest.approx(slow / fast)
    assert step_time.predict_speed(plan).step_seconds_between is None
    known = replace(default_constants(A100), fitted=("matrix_share",))
    assert step_time.predict_speed(other, known).step_seconds_between is None


@pytest.mark.parametrize(
    ("backend", "bytes_per_parameter"),
    [("ddp", 4 * 4), ("zero2", 6 * 2), ("zero3", 2 * 2 * 2 + 6 * 2), ("fsdp1", 4 * 2), ("fsdp", 3 * 2 * 2)],
)
def test_libraries_copy_what_they_gather_and_reduce(backend: str, bytes_per_parameter: int) -> None:
    """ZeRO-3 joins the pieces of two gathers, and gradients pass a bucket, a new layout and a division."""
    copies = seconds_of("copies beside collectives", predicted(backend, 8))
    written = copies * 0.85 * A100.memory_bandwidth / llama().parameters
    assert written == pytest.approx(bytes_per_parameter, rel=0.05)


def test_eager_are_the_classes_that_transformers_gives_no_sdpa() -> None:
    classes = {
        entry.class_name: AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(entry.model_type))]
        for entry in ARCHITECTURES.values()
        if entry.causal
    }
    assert {name for name, found in classes.items() if not found._supports_sdpa} == step_time.EAGER_ONLY
    assert all(found.__name__ == name for name, found in classes.items())


def test_a_job_that_asks_for_a_kernel_gets_it() -> None:
    assert step_time.attention_kernel(load_model("mpt-7b"), ModelSection()) == "eager"
    assert step_time.attention_kernel(load_model("llama-3-8b"), ModelSection()) == "sdpa"
    assert step_time.attention_kernel(load_model("llama-3-8b"), ModelSection(attention="eager")) == "eager"


@pytest.mark.parametrize(("width", "forward", "backward"), [(2, 8 * 2 + 16, 8 * 2 + 20), (4, 32, 36)])
def test_eager_attention_moves_every_score(width: int, forward: int, backward: int) -> None:
    """With products that cost nothing: heads x layers x s scores a token."""
    found = step_time.eager_attention(
        width=64, heads=8, layers=2, flops=1e30, bytes_per_second=1e9, element_bytes=width
    )
    assert found == pytest.approx((8 * 2 * forward / 1e9, 8 * 2 * backward / 1e9))


RANKS, TOKENS, VOCABULARY, HIDDEN = 4, 32, 512, 64
LLAMA = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=4, vocab_size=VOCABULARY, tie_word_embeddings=False, attn_implementation="eager",
)  # fmt: skip
NORM = 1
"""The last norm counts as a row of the output projection (`harness.plan.model`)."""


class Counted(TorchDispatchMode):
    """FLOPs of matrix products and elements of log-softmax on plain tensors, as one rank runs them.

    FlopCounterMode counts a product of DTensors as the whole group computes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.normalised = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        # DTensor finds out shapes with fake tensors of the whole group.
        if any(type(value) is not torch.Tensor for value in args if isinstance(value, torch.Tensor)):
            return out
        if func.overloadpacket is torch.ops.aten.mm:
            self.flops += flop_registry[func.overloadpacket](*args, out_val=out)
        if func.overloadpacket is torch.ops.aten._log_softmax:
            self.normalised += out.numel()
        return out


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def step(model: LlamaForCausalLM) -> None:
    tokens = torch.arange(TOKENS).reshape(1, TOKENS) % VOCABULARY
    model(input_ids=tokens, labels=tokens).loss.backward()


def counted(ranks: int) -> Counted:
    model = LlamaForCausalLM(LLAMA)
    if ranks > 1:
        cut_layers(model, init_device_mesh("cpu", (ranks,)))
    with Counted() as found:
        step(model)
    return found


def work(backend: str, ranks: int, folder: Path, device: Device = A100) -> step_time.Work:
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA.to_dict()))
    given = scenario(
        backend, ranks, model=load_model(str(file)), micro_batch_size=1, sequence_length=TOKENS, device=device
    )
    return step_time.Work(replace(given, options={"tensor": ranks}, label=f"{backend}:tensor={ranks}"))


@pytest.mark.usefixtures("ranks")
def test_a_rank_multiplies_a_part_of_all_layers_and_normalises_all_logits(tmp_path: Path) -> None:
    found, plan = counted(RANKS), work("tp", RANKS, tmp_path)
    products = sum(m.rows * m.columns * m.count for m in plan.decoder.matrices)
    assert found.flops == 6 * TOKENS * (products + (plan.decoder.head_rows - NORM) * HIDDEN)
    assert found.normalised == TOKENS * (plan.logit_rows - NORM)


@pytest.mark.parametrize("backend", ["tp", "fsdp-tp", "autotp-zero1"])
def test_the_loss_is_of_as_many_logits_as_each_rank_gathers(backend: str, tmp_path: Path) -> None:
    plan = work(backend, RANKS, tmp_path)
    (gathered,) = (c for c in plan.collectives[0] if c.term == LOGITS)
    assert gathered.payload_bytes // DTYPE_BYTES[gathered.dtype] == plan.tokens * (plan.logit_rows - NORM)


def test_the_time_of_the_loss_does_not_fall_with_the_ranks_of_a_layer(tmp_path: Path) -> None:
    def loss(ranks: int) -> float:
        return seconds_of("logits and loss", step_time.predict_speed(work("tp", ranks, tmp_path).scenario))

    assert loss(4) == loss(2)


def test_eager_attention_is_slower_on_long_sequences() -> None:
    asked = {"model": "llama-3.2-1b", "backends": "ddp", "gpu": A100.name, "world_sizes": (1,)}
    long = ("training.precision=bf16-mixed", "data.sequence_length=8192")
    scenario = row(*long, **asked).scenario
    other = replace(scenario, job=changed(scenario.job, model={"attention": "eager"}))
    fused, eager = step_time.predict_speed(scenario), step_time.predict_speed(other)
    assert eager.step_seconds > 1.5 * fused.step_seconds
