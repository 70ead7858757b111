"""What an estimate can be asked, and what a number of ranks cannot do."""

from dataclasses import replace
from typing import Any

import pytest

from harness.backends.registry import BUILT_IN
from harness.errors import HarnessError
from harness.forms.layout import Layout, Tensor
from harness.job.config import load_experiment
from harness.plan.answer import candidates
from harness.plan.hardware import with_training_defaults
from harness.plan.prediction import Prediction
from harness.plan.question import Question, default_tokens, read_count
from harness.plan.question import ask as ask_for
from tests.harness.plan.plans import DEVICE, FABRIC, MODEL, ask, question


def rows(*assignments: str, **asked: Any) -> list[Prediction]:
    return list(candidates(ask(*assignments, **asked)))


def row(*assignments: str, **asked: Any) -> Prediction:
    (found,) = rows(*assignments, **asked)
    return found


def test_a_pipeline_that_nobody_described_has_no_more_stages_than_blocks() -> None:
    """Of 126 blocks; 16 stages are the most that `harness recommend` tries too."""
    asked = {"model": "llama-3.1-405b", "backends": "all", "gpu": "H100-80", "fabric": "NDR400"}
    labels = {r.label for r in rows("training.micro_batch_size=16", world_sizes=(4096,), **asked)}
    assert {label for label in labels if label.startswith("pp")} == {"pp:stages=16"}
    (named,) = rows("training.micro_batch_size=4096", world_sizes=(4096,), **(asked | {"backends": "pp"}))
    assert named.unsupported == (
        "4096 stages need at least 4096 blocks, the model has 126; choose fewer stages"
    )


def test_all_means_every_built_in_backend_and_one_process_on_one_gpu_alone() -> None:
    assert ask(backends="all").labels == tuple(name for name in BUILT_IN if name != "single")
    labels = [(r.world_size, r.label) for r in rows(backends="all", world_sizes=(1, 2))]
    assert (1, "single") in labels
    assert (2, "single") not in labels


@pytest.mark.parametrize(("settings", "steps"), [(("training.accumulation_steps=64",), 64), ((), 1)])
def test_without_a_batch_the_micro_batch_is_one(settings: tuple[str, ...], steps: int) -> None:
    asked = ask(*settings)
    assert any(text.startswith("training.micro_batch_size=1, since n") for text in asked.remarks)
    (found,) = candidates(asked)
    assert (found.planned.micro_batch_size, found.planned.accumulation_steps) == (1, steps)
    assert found.planned.job.training.global_batch_size == 8 * steps


def test_a_batch_is_cut_for_each_number_of_ranks_and_a_hybrid_shards_within_a_node_unless_told() -> None:
    found = rows("training.global_batch_size=64", "training.micro_batch_size=2", world_sizes=(8, 16))
    assert [r.scenario.accumulation_steps for r in found if r.scenario] == [4, 2]
    found = rows(backends="fsdp-hybrid fsdp-hybrid:shard_size=2", world_sizes=(16,), per_node=8)
    assert [one.planned.shard_size for one in found] == [8, 2]


@pytest.mark.parametrize(
    ("setting", "asked", "message"),
    [
        ("training.steps=3", {"backends": "zero4"}, r"backend 'zero4' is unknown\. .*Did you mean 'zero"),
        ("training.steps=3", {"world_sizes": (12,)}, "12 ranks do not fill nodes of 8 GPUs"),
        ("training.global_batch_size=12", {}, "do not fit: training.global_batch_size"),
        ("data.sequence_length=2048", {"model": "gpt2"}, "2048 is longer than gpt2's context of 1024 posi"),
    ],
)
def test_a_wrong_question_is_refused(setting: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        ask(setting, **asked)


@pytest.mark.parametrize(
    ("backend", "settings", "reason"),
    [
        ("single", (), "one process only, not 8"),
        ("fsdp-hybrid:shard_size=3", (), "shard_size 3 does not divide the world size 8"),
        ("zero3:hpz=3", (), "hpz 3 does not divide the world size 8"),
        ("ulysses-zero3:hpz=2", (), "only where every rank has samples of its own"),
        ("fsdp:reshard=8", (), "reshard needs at least 2 groups of at least 2 ranks"),
        ("fsdp1-hybrid:shard_size=8", (), "hybrid sharding needs at least 2 replicas"),
        ("zero0", ("training.precision=bf16",), "fp32 masters at stage 0"),
        ("zero0:offload=optimizer", (), "stage 0 has nothing to offload"),
        ("zero2:offload=optimizer", ("training.precision=bf16",), "only if it is its own"),
        ("zero2:adam=deepspeed", (), "needs offload=optimizer or cpu"),
        ("fsdp:offload=cpu", ("training.precision=fp16-mixed",), "gradient scaler"),
        ("accelerate-fsdp", ("runtime.device=cpu",), "ignores an FSDP plugin"),
        ("fsdp1:offload=cpu", ("runtime.device=cpu",), "needs an accelerator"),
        ("fsdp1:offload=cpu,sync_each_batch=true", (), "cannot add the gradient of a micro-step"),
    ],
)
def test_what_a_strategy_cannot_do_stands_in_its_row(
    backend: str, settings: tuple[str, ...], reason: str
) -> None:
    found = row(*settings, backends=backend)
    assert reason in (found.unsupported or "")
    assert found.scenario is None


def test_muon_is_planned_where_it_runs() -> None:
    found = {r.label: r for r in rows("optimizer.kind=muon", backends="ddp fsdp zero1 fsdp1")}
    assert [label for label, r in found.items() if r.scenario] == ["ddp", "fsdp"]
    assert "flat partitions" in (found["zero1"].unsupported or "")
    terms = {t.name: t.bytes for t in found["ddp"].scenario.states.terms if t.kind == "optimizer"}
    assert terms["Muon's momentum"] > 0
    assert "Adam's moments" in terms


def asked(*settings: str, **changes: Any) -> Question:
    """What a search is asked, after the defaults of ordinary training."""
    values = {"gpus": 8, "device": DEVICE, "fabric": FABRIC, "tokens": 10**6} | changes
    experiment, remarks = with_training_defaults(MODEL, load_experiment(None, settings), values["device"])
    found = ask_for(
        MODEL, experiment, world_sizes=[values["gpus"]], ranks_per_node=8, device=values["device"],
        fabric=values["fabric"], tokens=values["tokens"], opens=True, remarks=remarks,
    )  # fmt: skip
    return found.opened(values["gpus"])


def test_tokens_are_read_as_people_write_them() -> None:
    written = ("4194304", "1,000,000", "4M", "1.5k", "5e5", "100_000")
    assert [*map(read_count, written)] == [4194304, 1_000_000, 4_000_000, 1500, 500_000, 100_000]
    for text in ("", "many", "0", "-4M", "4MB", "1e99", "1,00"):
        with pytest.raises(HarnessError, match="--tokens-per-step was given"):
            read_count(text)


def test_a_job_that_names_no_precision_sequence_or_preset_gets_those_of_ordinary_training() -> None:
    found = asked()
    assert (found.job.training.precision, found.sequence_length) == ("bf16-mixed", 2048)
    assert found.preset == "library-defaults"
    assert found.remarks[:3] == (
        "training.precision=bf16-mixed, since none is given",
        "data.sequence_length=2048, since none is given",
        "runtime.preset=library-defaults, since none is given",
    )
    old = replace(DEVICE, peak_flops={"float32": 1.0, "float16": 2.0})
    assert asked(device=old).job.training.precision == "fp16-mixed"
    alike = "runtime.preset=like-for-like"
    found = asked("training.precision=fp32", "data.sequence_length=1000", alike, tokens=8000)
    assert found.preset == "like-for-like"
    assert (found.job.training.precision, found.sequence_length, found.remarks) == ("fp32", 1000, ())
    assert found.checkpointing == (False, True)
    assert asked("training.activation_checkpointing=true").checkpointing == (True,)


@pytest.mark.parametrize(
    ("parameters", "gpus", "tokens"),
    [(1.2e9, 8, 500_000), (6.6e9, 8, 1_000_000), (8e9, 64, 2_000_000), (2e11, 64, 3_200_000),
     (8e9, 1024, 1024 * 4096)],
)  # fmt: skip
def test_tokens_of_a_step_have_a_default(parameters: float, gpus: int, tokens: int) -> None:
    weight = Tensor("w", (int(parameters),), "float32")
    model = replace(MODEL, layout=Layout(parameters=(weight,), decaying=frozenset()))
    assert default_tokens(model, gpus, 4096)[0] == tokens


def test_fine_tuning_has_a_default_of_its_own() -> None:
    for gpus, adapted in ((1, False), (1, True), (8, True)):
        assert default_tokens(MODEL, gpus, 4096, adapted=adapted)[0] == 64 * 4096
    assert default_tokens(MODEL, 128, 4096, adapted=True) == (128 * 4096, "a sample for each GPU")
    for gpus, said in (
        (1, "since none is given: 64 samples, as Llama 2 was fine-tuned"),
        (8, "--tokens-per-step=500000, since none is given: the batch of a GPT-3 model of this size"),
        (1024, "since none is given: a sample for each GPU"),
    ):
        assert any(said in remark for remark in asked(tokens=None, gpus=gpus).remarks)


@pytest.mark.parametrize(
    ("settings", "samples"),
    [(["training.accumulation_steps=4"], 32), (["training.global_batch_size=48"], 48),
     (["training.accumulation_steps=4", "training.micro_batch_size=2"], 64)],
)  # fmt: skip
def test_tokens_follow_from_the_batch_of_the_job(settings: list[str], samples: int) -> None:
    found = asked("data.sequence_length=100", *settings, tokens=None)
    assert found.tokens_per_step == 100 * samples
    training = found.job.training
    assert (training.global_batch_size, training.accumulation_steps) == (samples, None)
    assert training.micro_batch_size is None
    assert any(f"--tokens-per-step={100 * samples}, from " in remark for remark in found.remarks)
    with pytest.raises(HarnessError, match="would be ignored: --tokens-per-step decides"):
        asked(*settings, tokens=3200)


@pytest.mark.parametrize(
    ("samples", "taken"),
    # 61 as asked, though its micro-batches have 1 and 61 samples only; a million tokens on 8 GPUs in samples
    # of 4,096 are 30.52: 2^20.
    [(4.0, 4), (61.0, 61), (3.81, 4), (3.5, 3), (0.95, 1), (30.52, 32), (61.03, 64), (81.4, 80), (9.4, 9)],
)
def test_the_global_batch_is_near_what_is_asked_for(samples: float, taken: int) -> None:
    found = question(tokens=round(samples * 800))
    assert (found.samples_per_rank, found.tokens_per_step) == (taken, taken * 800)
    assert found.job.training.global_batch_size == 8 * taken
    if taken != samples:
        said = f"{taken * 800:,} tokens per step instead of {round(samples * 800):,}: {8 * taken} samples of"
        assert found.remarks[-1].startswith(said)


def test_fewer_samples_than_gpus_leave_none_a_rank_but_some_a_group() -> None:
    found = question(gpus=16, tokens=700)
    assert (found.samples_per_rank, found.samples, found.tokens_per_step) == (0, 6, 600)
    assert found.job.training.global_batch_size == 6
    # 16 stages, the most ranks that share samples, leave 4 pipelines of 64 GPUs.
    assert question(gpus=64, tokens=300).samples == 0
    assert question(gpus=64, tokens=500).samples == 4


@pytest.mark.parametrize(
    ("settings", "changes", "problem"),
    [
        (["training.micro_batch_size=2"], {}, "training.micro_batch_size would be ignored"),
        (["training.micro_batch_size=2"], {"tokens": None}, "add training.accumulation_steps or give"),
        (["training.global_batch_size=2"], {}, "training.global_batch_size would be ignored"),
        (["data.sequence_length=4096"], {}, "longer than invented.s context of 2048 positions"),
        (["data.sequence_length=100"], {"tokens": 99}, "less than one sample of 100 tokens"),
        ([], {"gpus": 12}, "12 ranks do not fill nodes of 8 GPUs"),
    ],
)
def test_contradictions_are_refused(settings: list[str], changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(HarnessError, match=problem):
        asked(*settings, **changes)


def test_network_that_nobody_names_is_that_of_the_vendors_own_machine() -> None:
    sold = replace(DEVICE, networks=(replace(FABRIC, name="rack", most_gpus=32), FABRIC))
    found = asked(gpus=16, fabric=None, device=sold)
    assert (found.network.name, found.network.assumed) == ("rack", True)
    assert any("--fabric=rack, since none is given" in remark for remark in found.remarks)
    assert asked(gpus=64, fabric=None, device=sold).network.name == "net"
    given = asked(gpus=16, device=sold).network
    assert (given.name, given.assumed) == ("net", False)
    part = asked(gpus=4, fabric=None)
    assert (part.nodes, part.gpus_per_node) == (1, 4)
