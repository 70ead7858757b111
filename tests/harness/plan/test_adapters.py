from math import ceil

import pytest

from benchmarks.published.programs import packed_head
from harness.backends.registry import BUILT_IN
from harness.errors import HarnessError
from harness.forms.families import collectives, model_states
from harness.forms.layout import Layout
from harness.forms.workload import Workload
from harness.job.experiment import Experiment
from harness.job.job import AdapterSection, OptimizerSection
from harness.plan.hardware import with_training_defaults
from harness.plan.model import DEFAULT_TARGETS, packed_inputs, with_adapters
from harness.plan.models import load_model
from harness.rank.data import DataFacts
from harness.rank.models.description import describe_layout
from harness.rank.models.model import build_model, model_config
from harness.rank.models.optimizer import update_groups
from tests.harness.forms.layouts import LLAMA_SMALL
from tests.harness.forms.layouts import layout_of as model_layout
from tests.harness.rank.small_models import CONFIGS, VOCABULARY, job_of

TARGETS = {"tied llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}


def section(targets: list[str] | None, **values) -> AdapterSection:
    return AdapterSection(kind="lora", targets=targets, **({"rank": 2} | values))


@pytest.mark.parametrize("targets", ["some", "all"])
@pytest.mark.parametrize("architecture", list(TARGETS))
def test_the_layout_is_that_of_the_model_that_peft_builds(architecture: str, targets: str) -> None:
    asked = section(TARGETS[architecture] if targets == "some" else ["all-linear"], base_dtype="bf16")
    plain, adapted = job_of(CONFIGS[architecture]), job_of(CONFIGS[architecture])
    adapted = adapted.model_copy(update={"adapter": asked})
    found = with_adapters(described(plain), asked, str(CONFIGS[architecture]["model_type"]))
    expected = described(adapted)
    assert set(found.parameters) == set(expected.parameters)
    assert (found.frozen, found.decaying) == (expected.frozen, expected.decaying)


def described(job) -> Layout:
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))
    return describe_layout(model, update_groups(model, OptimizerSection()))


def test_targets_must_be_named_and_exist() -> None:
    layout = model_layout(LLAMA_SMALL)
    with pytest.raises(HarnessError, match="targets is null"):
        with_adapters(layout, section(None), "unheard-of")
    with pytest.raises(HarnessError, match="no linear layers"):
        with_adapters(layout, section(["query"]), "llama")


def test_targets_that_are_not_named_are_peft_s() -> None:
    from peft.utils import constants

    of_peft = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {kind: of_peft[kind] for kind in DEFAULT_TARGETS} == DEFAULT_TARGETS
    layout = model_layout(LLAMA_SMALL)
    assert with_adapters(layout, section(None), "llama") == with_adapters(
        layout, section(["q_proj", "v_proj"]), "llama"
    )


def test_packed_weights_take_half_a_byte_and_scales_lie_beside_them() -> None:
    """One byte per 64 values and four per 16,384 of them (bitsandbytes, compress_statistics)."""
    plain = model_layout(LLAMA_SMALL)
    layout = with_adapters(plain, section(["q_proj"], base_dtype="nf4"), "llama")
    packed = [tensor for tensor in layout.parameters if tensor.dtype == "uint8"]
    inside = tuple(f"{block}." for block in plain.blocks)
    linear = [t for t in plain.parameters if t.name.startswith(inside) and len(t.shape) == 2]
    assert sum(t.bytes for t in packed) == sum(t.numel for t in linear) // 2
    scales = sum(t.bytes for t in layout.buffers) - sum(t.bytes for t in plain.buffers)
    assert scales == sum(ceil(t.numel / 64) + 4 * ceil(t.numel / 64 / 256) for t in linear)
    experiment = Experiment.model_validate({"adapter": {"kind": "lora", "base_dtype": "nf4"}})
    (remark,) = with_training_defaults(load_model("llama-3.2-1b"), experiment, None)[1]
    assert "double quantisation" in remark
    assert f"{4 + 8 / 64 + 32 / 16384:.2f} bits a value of linear layers ({4 + 32 / 64:g} without)" in remark
    plainly = with_adapters(plain, section(["q_proj"], base_dtype="nf4"), "llama", nested_scales=False)
    scales = sum(t.bytes for t in plainly.buffers) - sum(t.bytes for t in plain.buffers)
    assert scales == sum(4 * ceil(t.numel / 64) for t in linear)


def test_a_packed_head_takes_half_a_byte_too() -> None:
    plain = model_layout({**LLAMA_SMALL, "tie_word_embeddings": False})
    adapter = section(["q_proj"], base_dtype="nf4")
    with_head, without = (
        with_adapters(plain, adapter, "llama", packs_head=packs).parameters for packs in (True, False)
    )
    packed = {t.name: t.numel for t in with_head if t.dtype == "uint8"}
    assert packed["lm_head.weight"] == packed_head(plain) // 2
    assert packed_head(plain) == next(t.numel for t in without if t.name == "lm_head.weight")
    assert packed_head(model_layout({**LLAMA_SMALL, "tie_word_embeddings": True})) == 0


@pytest.mark.parametrize(
    ("targets", "dropout", "kept"),
    [
        (["q_proj", "v_proj"], 0.1, {"q_proj", "gate_proj", "down_proj"}),
        (["q_proj", "v_proj"], 0.0, {"gate_proj", "down_proj"}),
        (["all-linear"], 0.0, set()),
    ],
)
def test_packed_layers_keep_inputs_that_nothing_else_keeps(
    targets: list[str], dropout: float, kept: set[str]
) -> None:
    """Layers that share an input keep it once; the output of attention lies there already."""
    layout = model_layout(LLAMA_SMALL)
    adapter = section(targets, base_dtype="nf4", dropout=dropout)
    found = packed_inputs(layout, adapter, "llama")
    assert {name.rpartition(".")[2] for name in found} == kept
    every = {name.rpartition(".")[2] for name in packed_inputs(layout, adapter, "llama", alone=False)}
    assert every == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    shapes = {t.name.removeprefix(f"{layout.blocks[0]}."): t.shape for t in layout.parameters}
    names = ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
    widths = {name.rpartition(".")[2]: shapes[f"{name}.weight"][1] for name in names}
    assert all(width == widths[name.rpartition(".")[2]] for name, width in found.items())


def workload(backend: str, layout: Layout, **values) -> Workload:
    return Workload(layout=layout, strategy=BUILT_IN[backend].strategy, world_size=4, **values)


def states(backend: str, layout: Layout, **values) -> dict[str, int]:
    return model_states(workload(backend, layout, **values)).kinds()


@pytest.mark.parametrize("backend", ["ddp", "zero2", "zero3", "fsdp"])
def test_states_of_what_is_trained_are_those_of_the_adapters_alone(backend: str) -> None:
    layout = with_adapters(model_layout(LLAMA_SMALL), section(["q_proj"], rank=8), "llama")
    own = states(backend, layout)
    share = 1 if backend == "ddp" else 4
    whole = 4 * layout.trained_count
    if backend != "zero2":  # it keeps whole gradients of what straddles the ends of its partition
        assert own["gradients"] == pytest.approx(whole / share, rel=0.3)
    assert own["optimizer"] == pytest.approx(2 * whole / share, rel=0.3)
    assert own["weights"] == pytest.approx(
        4 * layout.parameter_count / (4 if backend in ("zero3", "fsdp") else 1), rel=0.05
    )


def test_fsdp1_holds_and_reduces_gradients_of_frozen_neighbours() -> None:
    """Three blocks of equal size; embedding, last norm and output train nothing."""
    layout = with_adapters(model_layout(LLAMA_SMALL), section(["q_proj"]), "llama")
    blocks = 4 * sum(t.numel for name, tensors in layout.units() if name for t in tensors)
    assert blocks / 4 <= states("fsdp1", layout)["gradients"] <= 1.01 * blocks / 4
    moved = collectives(workload("fsdp1", layout)).collectives
    reduced = sum(c.payload_bytes for c in moved if c.op == "reduce_scatter")
    assert blocks <= reduced <= 1.01 * blocks
    assert reduced > 10 * 4 * layout.trained_count


@pytest.mark.parametrize(("base_dtype", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_frozen_weights_count_in_their_own_dtype(backend: str, base_dtype: str, width: int) -> None:
    adapter = section(["q_proj"], base_dtype=base_dtype)
    layout = with_adapters(model_layout(LLAMA_SMALL), adapter, "llama")
    frozen = layout.parameter_count - layout.trained_count
    held = states(backend, layout, precision="bf16-mixed")["weights"]
    share = 4 if backend == "fsdp" else 1
    assert held == pytest.approx((width * frozen + 4 * layout.trained_count) / share, rel=0.05)
