"""A model, a GPU and predictions whose every figure can be checked by hand."""

from dataclasses import replace
from typing import Any

from harness.forms.layout import Layout, Tensor
from harness.forms.terms import Term
from harness.job.config import load_experiment
from harness.plan.hardware import Device, Fabric, TimeTerm, with_training_defaults
from harness.plan.model import PlannedModel
from harness.plan.prediction import MemoryPrediction, Moment, Predictors
from harness.plan.question import Question, ask
from harness.plan.scenario import Scenario
from harness.plan.step_time import SpeedPrediction

PARAMETERS = 1_000_000
MODEL = PlannedModel(
    name="invented",
    source="a test",
    architecture="LlamaForCausalLM",
    config={"model_type": "llama", "max_position_embeddings": 2048},
    layout=Layout(
        parameters=(
            Tensor("embedding.weight", (500, 1000), "float32"),
            Tensor("blocks.0.weight", (500, 1000), "float32"),
        ),
        decaying=frozenset(("embedding.weight", "blocks.0.weight")),
        blocks=("blocks.0",),
    ),
    multiplying_parameters=500_000,
    layers=1,
    attention_width=100,
)
_NAMES = ("embedding", *(f"blocks.{index}" for index in range(3)))
THREE_BLOCKS = replace(
    MODEL,
    layout=Layout(
        parameters=tuple(Tensor(f"{name}.weight", (250, 1000), "float32") for name in _NAMES),
        decaying=frozenset(f"{name}.weight" for name in _NAMES),
        blocks=_NAMES[1:],
    ),
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
    made = ask(
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
            guide_ratio=0.5,
            peak_ratio=0.25,
            remarks=("constants: invented",),
        )

    return predict


def predictors(
    *, per_token: int = 1000, states: int = 16, communication: float = 0.1, small: float = 0.1
) -> Predictors:
    return Predictors(
        memory=memory(per_token, states), speed=speed(communication, small), ahead=trace_nothing
    )


def trace_nothing(_: object) -> None:
    """Invented predictors need no profiles."""
