"""Where nothing fits, what people do is predicted by what predicts everything else."""

from dataclasses import replace
from itertools import pairwise

from harness.job.config import load_experiment
from harness.plan.alternatives import (
    CONTEXT,
    EACH_REDUCED,
    MORE_GPUS,
    OFFLOAD,
    STATES,
    Alternative,
    alternative_lines,
    reaches_more,
)
from harness.plan.answer import Typed, estimate, run_command, ways_out
from harness.plan.hardware import Fabric
from harness.plan.prediction import MemoryPrediction, Predictors, predict
from harness.plan.question import Question, ask
from harness.plan.scenario import Scenario, why_memory_unknown
from harness.plan.step_time import SpeedPrediction
from tests.harness.plan.plans import A100, llama, needing, scenario

SMALL = replace(A100, name="small", memory_bytes=24 * 10**9)
ONE = "training.micro_batch_size=1"


def held(asked: Scenario) -> int:
    return sum(asked.states.kinds(host=False).values())


def states_only(asked: Scenario) -> MemoryPrediction:
    assert why_memory_unknown(asked) is None
    return needing(weights=held(asked))


STATES_ONLY = Predictors(memory=states_only, speed=lambda _: None)


def question(*labels: str, ranks: int = 2, settings: tuple[str, ...] = (ONE,), there: int = 24) -> Question:
    """Of Llama-2-7B, of which peft knows what to adapt, on small GPUs."""
    plain = llama()
    return ask(
        replace(plain, config={**plain.config, "model_type": "llama"}),
        load_experiment(None, ("training.precision=bf16-mixed", *settings)),
        world_sizes=[ranks], ranks_per_node=min(ranks, 8), backends=labels,
        device=replace(SMALL, memory_bytes=there * 10**9),
    )  # fmt: skip


def found_for(asked: Question, by: Predictors = STATES_ONLY) -> list[Alternative]:
    return list(ways_out(asked, estimate(asked, by), by))


def ways(*labels: str, by: Predictors = STATES_ONLY, **changes: object) -> dict[str, Alternative]:
    found = found_for(question(*labels, **changes), by)  # type: ignore[arg-type]
    return {one.name or one.called: one for one in found}


def test_each_way_is_the_job_with_its_settings() -> None:
    # 6.7e9 parameters: 16 bytes each of states over 2 ranks are 54 GB of 24.
    found = ways("zero3", "fsdp")
    assert list(found) == [MORE_GPUS, OFFLOAD, "LoRA", "QLoRA"]  # none that does not fit
    for one in found.values():
        assert one.needed_bytes == held(one.planned)
        for key, value in one.settings.items():
            section, _, name = key.partition(".")
            assert getattr(getattr(one.planned.job, section), name) == value
    qlora, lora = (found[name].needed_bytes for name in ("QLoRA", "LoRA"))
    assert qlora < lora < 24e9


def test_where_none_fits_each_says_what_it_needs() -> None:
    found = ways("ddp", there=1)
    assert list(found) == [MORE_GPUS, "8-bit AdamW", "bf16 without fp32 masters", "LoRA", "QLoRA"]
    assert not found["8-bit AdamW"].states_alone
    assert found["8-bit AdamW"].as_json()["fits"] is False
    first, *lines = alternative_lines(list(found.values()))
    assert first == "None of the usual alternatives fits either"
    assert lines[0] == f"- {found[MORE_GPUS].words()}"
    assert lines[0].startswith(f"- {MORE_GPUS}: does not fit: ")


def test_more_gpus_are_the_fewest_that_do() -> None:
    one = ways("fsdp")[MORE_GPUS]
    assert one.planned.world_size > 2
    assert one.settings == {}  # a batch of as many samples a rank
    assert held(one.planned) <= SMALL.memory_bytes < 2 * held(one.planned)


def test_more_gpus_keep_a_global_batch_that_is_given_and_are_no_more_than_its_samples() -> None:
    one = ways("fsdp", settings=("training.global_batch_size=64",))[MORE_GPUS]
    assert one.planned.samples * one.planned.world_size == 64
    assert MORE_GPUS not in ways("fsdp", settings=("training.global_batch_size=2",))


def test_a_batch_is_split_otherwise_where_that_makes_it_fit() -> None:
    def by_samples(asked: Scenario) -> MemoryPrediction:
        return needing(weights=8 * 10**9 * asked.micro_batch_size)

    by = replace(STATES_ONLY, memory=by_samples)
    asked = question("fsdp", ranks=8, settings=("training.micro_batch_size=8",))
    first, *_ = found_for(asked, by)
    assert first.called == "micro-batches of 1 sample"
    assert first.settings == {"training.global_batch_size": 64, "training.micro_batch_size": 1}
    assert first.planned.accumulation_steps == 8


def test_of_a_job_that_offloads_no_second_offload_is_tried() -> None:
    by = replace(STATES_ONLY, memory=lambda _: needing(weights=10 * SMALL.memory_bytes))
    for label in ("fsdp:offload=cpu", "zero3:adam=deepspeed,offload=cpu"):
        found = ways(label, by=by)
        assert found
        assert OFFLOAD not in found


def test_adapters_are_offloaded_where_they_fit_no_other_way() -> None:
    def memory(asked: Scenario) -> MemoryPrediction:
        is_small = asked.job.adapter.is_present and asked.options.get("offload", "none") != "none"
        return needing(weights=(10 if is_small else 30) * 10**9)

    found = ways("fsdp", ranks=1, by=replace(STATES_ONLY, memory=memory))
    assert [(one.name, one.label) for one in found.values()] == [("LoRA", "fsdp:offload=cpu")]


def test_gradients_that_add_up_whole_may_be_reduced_in_every_micro_step() -> None:
    def memory(one: Scenario) -> MemoryPrediction:
        is_small = one.micro_batch_size == 1 and (one.label != "fsdp" or one.accumulation_steps == 1)
        return needing(weights=(20 if is_small else 30) * 10**9)

    by = replace(STATES_ONLY, memory=memory)
    first, *_ = found_for(question("fsdp", ranks=8, settings=(ONE, "training.accumulation_steps=4")), by)
    assert first.words().startswith(f"{EACH_REDUCED}: fsdp:sync_each_batch=True on 8 ranks, micro-batch 1: ")
    assert first.is_roomy
    assert first.settings == {}


def test_a_way_that_the_job_takes_is_no_other_one() -> None:
    adapted = ("adapter.kind=lora", "adapter.base_dtype=nf4")
    again = ways("zero3", settings=(ONE, *adapted), there=1)
    assert again
    assert not any("LoRA" in one.called or "frozen base" in one.called for one in again.values())


def test_what_fits_comes_with_its_command() -> None:
    found = list(ways("zero3").values())
    first, *lines = alternative_lines(found, lambda one: run_command(one, Typed(model="llama-2-7b")))
    assert first == "What fits instead"
    assert len(lines) == 2 * len(found)
    (command,) = (
        after
        for line, after in pairwise(lines)
        if line.startswith("- QLoRA: zero3 on 2 ranks, micro-batch 1: ")
    )
    assert command.startswith("  harness run --backend zero3 --nproc 2 --model llama-2-7b --set ")
    assert "adapter.base_dtype=nf4" in command
    assert "training.global_batch_size=2 " in command  # micro-batch 1 on two GPUs, as predicted


def test_an_offer_says_its_host_memory_its_network_and_that_it_fits_closely() -> None:
    def close(asked: Scenario) -> MemoryPrediction:
        return needing(weights=23_000_000_000, host_bytes_per_node=130 * 10**9)

    network = Fabric(name="net", bandwidth_per_gpu=1e9, latency_seconds=0.0, source="a test", assumed=True)
    asked = scenario("zero3", 16, micro_batch_size=1, device=SMALL, fabric=network)
    values = {"name": OFFLOAD, "settings": {}}
    found = Alternative(**vars(predict(asked, replace(STATES_ONLY, memory=close), timed=False)), **values)
    assert found.is_roomy
    assert found.words() == (
        "offload: zero3 on 16 ranks, micro-batch 1, if nodes are joined by net (--fabric): 23.0 of 24.0 GB "
        "(close to the limit) and 130 GB of host memory per node"
    )
    assert found.as_json()["verdict"] == "close"
    assert found.as_json()["host_bytes_per_node"] == 130 * 10**9


def test_what_reaches_more_than_the_answer_is_named() -> None:
    lora, qlora = two_ways()
    slow, fast = replace(lora, speed=timed(100.0)), replace(qlora, speed=timed(300.0))
    assert reaches_more([slow, fast], 290.0) == []
    (line,) = reaches_more([slow, fast], 250.0)
    assert line == f"{fast.name} reaches more: {fast.figures}"


def test_of_ways_that_reach_more_the_one_is_named_that_changes_least() -> None:
    lora = replace(two_ways()[1], speed=timed(500.0))
    eight_bit, pure = (replace(lora, name=name, speed=timed(300.0)) for name in STATES)
    for found in ([lora, eight_bit, pure], [eight_bit, pure, lora]):
        assert reaches_more(found, 200.0)[0].startswith(f"{eight_bit.name} reaches more: ")
        assert reaches_more(found, 290.0)[0].startswith("QLoRA reaches more: ")
    faster = replace(pure, speed=timed(400.0))
    assert reaches_more([lora, eight_bit, faster], 200.0)[0].startswith(f"{pure.name} reaches more: ")


def two_ways() -> list[Alternative]:
    found = ways("zero3")
    return [found["LoRA"], found["QLoRA"]]


def timed(rate: float) -> SpeedPrediction:
    return SpeedPrediction(
        computing=(), communication=(), exposed_seconds=0.0, step_seconds=1.0,
        tokens_per_second_per_gpu=rate, model_flops_utilization=0.1, joules_per_step=None, remarks=(),
    )  # fmt: skip


def test_long_samples_may_be_divided_where_that_makes_them_fit() -> None:
    def by_length(asked: Scenario) -> MemoryPrediction:
        return needing(weights=40 * 10**9 * asked.mesh.data_size // asked.world_size)

    by = replace(STATES_ONLY, memory=by_length)
    found = ways("fsdp", ranks=8, settings=(ONE, "data.sequence_length=8192"), by=by)[CONTEXT]
    assert found.label.startswith("fsdp-cp")
    assert found.planned.mesh.data_size < 8
    assert found.planned.samples * found.planned.mesh.data_size == 8
    assert CONTEXT not in ways("fsdp", ranks=8, settings=(ONE, "data.sequence_length=4096"), by=by)
