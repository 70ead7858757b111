"""Builders of the tests of plans: scenarios of Llama geometries on A100s, questions about shipped models, and
an invented model, GPU and predictions whose figures can be checked by hand."""

from dataclasses import replace
from functools import cache
from typing import Any

from harness.backends.registry import BUILT_IN
from harness.forms.layout import Layout, Tensor
from harness.forms.terms import Term
from harness.job.config import load_experiment
from harness.job.job import Job
from harness.plan.answer import candidates, estimate
from harness.plan.hardware import Device, Fabric, TimeTerm, load_hardware, with_training_defaults
from harness.plan.model import PlannedModel
from harness.plan.models import load_model
from harness.plan.prediction import MemoryPrediction, Moment, Prediction, Predictors, with_traffic
from harness.plan.question import Question
from harness.plan.question import ask as asked
from harness.plan.scenario import Scenario
from harness.plan.step_time import SpeedPrediction

A100 = Device(
    name="A100-80", memory_bytes=80 * 2**30, context_bytes=2**29, memory_bandwidth=2039e9,
    peak_flops={"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12},
    link_bandwidth=300e9, link="NVLink", watts=400.0, source="data sheet",
)  # fmt: skip
INFINIBAND = Fabric(name="HDR", bandwidth_per_gpu=25e9, latency_seconds=14e-6, source="data sheet")


def layout_of(shapes: dict[str, tuple[int, ...]], blocks: tuple[str, ...]) -> Layout:
    """In fp32; matrices decay."""
    return Layout(
        parameters=tuple(Tensor(name, shape, "float32") for name, shape in shapes.items()),
        decaying=frozenset(name for name, shape in shapes.items() if len(shape) > 1),
        blocks=blocks,
    )


@cache
def llama(hidden: int = 4096, layers: int = 32, inner: int = 11008, vocabulary: int = 32000) -> PlannedModel:
    """Llama-2-7B, or the same with other widths; heads of 128."""
    blocks = tuple(f"model.layers.{index}" for index in range(layers))
    inside = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"},
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes = {
        "model.embed_tokens": (vocabulary, hidden),
        **{f"{block}.{name}": shape for block in blocks for name, shape in inside.items()},
        "model.norm": (hidden,),
        "lm_head": (vocabulary, hidden),
    }
    layout = layout_of({f"{name}.weight": shape for name, shape in shapes.items()}, blocks)
    return PlannedModel(
        name="llama",
        source="test",
        architecture="LlamaForCausalLM",
        config={
            "hidden_size": hidden, "intermediate_size": inner, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128,
        },
        layout=layout,
        multiplying_parameters=layout.parameter_count - vocabulary * hidden,
        layers=layers,
        attention_width=hidden,
    )  # fmt: skip


def scenario(backend: str, world_size: int, **changes: Any) -> Scenario:
    """bf16-mixed, micro-batch 2 of 4096 tokens, eight A100s a node; `changes` of the scenario or the job."""
    names = ("precision", "activation_checkpointing")
    training = {name: changes.pop(name) for name in names if name in changes}
    data = {"sequence_length": changes.pop("sequence_length", 4096)}
    job = Job.model_validate({"data": data, "training": {"precision": "bf16-mixed"} | training})
    values: dict[str, Any] = {
        "model": llama(), "ranks_per_node": min(8, world_size), "micro_batch_size": 2,
        "accumulation_steps": 1, "preset": "library-defaults", "device": A100, "fabric": INFINIBAND,
        "strategy": BUILT_IN[backend].strategy,
    }  # fmt: skip
    return Scenario(job=job, world_size=world_size, **({"label": backend} | values | changes))


def ask(
    *assignments: str, model: str = "bloom-560m", backends: str = "ddp", world_sizes: tuple[int, ...] = (8,),
    per_node: int = 8, gpu: str | None = None, fabric: str | None = None,
) -> Question:  # fmt: skip
    """A question as the command line asks it; `backends` separated by blanks."""
    hardware = load_hardware()
    return asked(
        load_model(model),
        load_experiment(None, assignments),
        backends=backends.split(),
        world_sizes=world_sizes,
        ranks_per_node=per_node,
        device=hardware.device(gpu) if gpu else None,
        fabric=hardware.fabric(fabric) if fabric else None,
    )


def rows(*assignments: str, **asked: Any) -> list[Prediction]:
    """The answers."""
    return estimate(ask(*assignments, **asked))


def row(*assignments: str, **asked: Any) -> Prediction:
    """The only answer."""
    (found,) = rows(*assignments, **asked)
    return found


def states(*assignments: str, **asked: Any) -> Prediction:
    """The only answer, with states and traffic alone: nothing is traced."""
    (found,) = candidates(ask(*assignments, **asked))
    return with_traffic(found)


PARAMETERS = 1_000_000
MODEL = PlannedModel(
    name="invented",
    source="a test",
    architecture="LlamaForCausalLM",
    config={"model_type": "llama", "max_position_embeddings": 2048},
    layout=layout_of({"embedding.weight": (500, 1000), "blocks.0.weight": (500, 1000)}, ("blocks.0",)),
    multiplying_parameters=500_000,
    layers=1,
    attention_width=100,
)
_NAMES = ("embedding", *(f"blocks.{index}" for index in range(3)))
THREE_BLOCKS = replace(
    MODEL, layout=layout_of({f"{name}.weight": (250, 1000) for name in _NAMES}, _NAMES[1:])
)
"""As many parameters; compiled, it has bounds."""
DEVICE = Device(
    name="G-10", memory_bytes=10_000_000, context_bytes=0, memory_bandwidth=1e12,
    peak_flops={"float32": 1e12, "bfloat16": 2e12}, link_bandwidth=1e11, link="wire", watts=100.0,
    source="a test",
)  # fmt: skip
JOB = load_experiment(None, []).job()
FABRIC = Fabric(name="net", bandwidth_per_gpu=1e10, latency_seconds=1e-6, source="a test")


def question(*settings: str, gpus: int = 8, tokens: int = 32 * 100, **changes: Any) -> Question:
    """By default 8 GPUs of one node, and 4 samples of 100 tokens for each; libraries alike."""
    given = ["data.sequence_length=100", "runtime.preset=like-for-like", *settings]
    experiment, remarks = with_training_defaults(MODEL, load_experiment(None, given), DEVICE)
    made = asked(
        MODEL, experiment, remarks=remarks, world_sizes=[gpus], ranks_per_node=8, device=DEVICE,
        fabric=FABRIC, tokens=tokens,
    )  # fmt: skip
    return replace(made.opened(gpus), **changes)


def memory(per_token: int = 1000, states: int = 16) -> Any:
    """States of 16 bytes per parameter, cut by the stage; activations per token, a tenth when recomputed."""

    def predict(scenario: Scenario) -> MemoryPrediction:
        shards = scenario.shard_size or scenario.world_size
        share = {0: 1.0, 1: 0.25 + 0.75 / shards, 2: 0.125 + 0.875 / shards, 3: 1 / shards}
        whole = states * scenario.model.parameters * share[scenario.strategy.stage]
        offloaded = scenario.options.get("offload", "none") != "none"
        tokens = scenario.micro_batch_size * scenario.job.data.sequence_length
        kept = per_token // 10 if scenario.job.training.activation_checkpointing else per_token
        terms = (
            term("optimizer", round(whole), host=offloaded),
            term("activations", tokens * kept),
        )
        host = round(whole) * scenario.ranks_per_node if offloaded else 0
        return MemoryPrediction(
            moments=(Moment(name="forward/backward", terms=terms),), host_bytes_per_node=host
        )

    return predict


def needing(*, host_bytes_per_node: int = 0, **kinds: int) -> MemoryPrediction:
    """So many bytes of each kind, at one moment."""
    terms = tuple(term(kind, count) for kind, count in kinds.items())
    moment = Moment(name="forward/backward", terms=terms)
    return MemoryPrediction(moments=(moment,), host_bytes_per_node=host_bytes_per_node)


def term(kind: str, count: int, *, host: bool = False) -> Term:
    return Term(kind=kind, name=kind, bytes=count, formula="", source="a test", host=host)


def speed(communication: float = 0.1, small: float = 0.1) -> Any:
    """Computing takes 1 s, 1.3 s with recomputation, with micro-batches of one `small` more, and more with
    offload; a rank of stage s communicates (s + 1) x `communication`, half of it exposed."""

    def predict(scenario: Scenario) -> SpeedPrediction:
        again = 1.3 if scenario.job.training.activation_checkpointing else 1.0
        computing = again * (1 + small / scenario.micro_batch_size)
        if scenario.options.get("offload", "none") != "none":
            computing += 1.0
        total = (scenario.strategy.stage + 1) * communication
        step = computing + total / 2
        tokens = scenario.micro_batch_size * scenario.accumulation_steps * scenario.job.data.sequence_length
        tokens = tokens * scenario.mesh.data_size // scenario.world_size  # of a GPU, by ranks that share them
        return SpeedPrediction(
            computing=(TimeTerm(name="products", seconds=computing, formula="", source="a test"),),
            communication=(TimeTerm(name="gradients", seconds=total, formula="", source="a test"),),
            exposed_seconds=total / 2,
            step_seconds=step,
            tokens_per_second_per_gpu=tokens / step,
            model_flops_utilization=0.4,
            joules_per_step=100.0 * step * scenario.world_size,
            remarks=("constants: invented",),
        )

    return predict


def predictors(
    *, per_token: int = 1000, states: int = 16, communication: float = 0.1, small: float = 0.1
) -> Predictors:
    return Predictors(memory=memory(per_token, states), speed=speed(communication, small))
