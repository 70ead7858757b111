"""What `harness estimate` says first, as an engineer asks it, and that what follows says the same."""

import json
import re

import pytest
from click.testing import CliRunner

from harness.cli.estimate import estimate, recommend

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=60)]
BF16_BASE = "adapter.base_dtype=bf16"
LONG = ("data.sequence_length=32768", "training.activation_checkpointing=true")


def said(*words: str, settings: tuple[str, ...] = ()) -> list[str]:
    """The answer at micro-batches of one sample unless told otherwise, and the paragraphs after it, each on
    one line."""
    batch = () if any("micro_batch_size" in text for text in settings) else ("training.micro_batch_size=1",)
    given = [word for text in (*settings, *batch) for word in ("--set", text)]
    done = CliRunner().invoke(estimate, [*words, *given])
    assert done.exit_code == 0, done.output
    return [" ".join(part.split()) for part in done.stdout.split("\n\n")]


@pytest.mark.parametrize(
    ("words", "settings", "without", "needed"),
    [
        (("--model", "llama-2-7b", "--gpu", "RTX-4090", "--world-size", "1"), ("adapter.kind=lora",),
         "activation checkpointing", "16.7 of 25.4 GB"),
        (("--model", "llama-2-13b", "--gpu", "A100-40"), (), "activation checkpointing", "33.9 of 42.4 GB"),
        (("--model", "llama-3.1-8b", "--gpu", "A100-40"), LONG, "a chunked loss", "35.2 of 42.4 GB"),
        (("--model", "llama-2-7b", "--gpu", "A100-40", "--backends", "zero1,zero2,zero3,fsdp"),
         ("training.micro_batch_size=32", LONG[1]), "micro-batches of one sample", "28.4 of 42.4 GB"),
    ],
)  # fmt: skip
def test_the_first_line_has_what_changes_least_and_fits(
    words: tuple[str, ...], settings: tuple[str, ...], without: str, needed: str
) -> None:
    first, *rest = said(*words, settings=settings)
    assert f": nothing fits; with {without}: " in first
    assert f": {needed}, about " in first
    (ways,) = (part for part in rest if part.startswith("What fits instead"))
    offer = first.partition(f"; with {without}: ")[2]
    offer = re.split(r" With the batch open: | \S+ reaches more: ", offer)[0]
    assert ways.startswith(f"What fits instead - {without}: {offer} harness estimate ")
    assert "does not fit" not in ways
    if "adapter.kind=lora" in settings:  # that trains adapters already
        assert not re.search(r"- LoRA\b", ways)


def test_one_gpu_needs_no_library() -> None:
    first, *_ = said("--model", "llama-3.2-1b", "--gpu", "A100-80", "--world-size", "1")
    assert first.startswith("1 rank, micro-batch 1, accumulation 1: use single, 32.7 of 85.1 GB, about ")
    assert "Runner-up" not in first


def test_one_gpu_on_which_nothing_fits_gets_ways_for_one_gpu_first() -> None:
    words = ("--model", "llama-3.2-1b", "--gpu", "RTX-4090", "--world-size", "1")
    first, *rest = said(*words)
    assert ": nothing fits; offload: zero1:adam=deepspeed,offload=optimizer on 1 rank, " in first
    offers = re.findall(r"- ([^:]*): (\S+) on (\d) ranks?", " ".join(rest))
    assert [name.partition(",")[0] for name, *_ in offers] == [
        "offload", "8-bit AdamW", "bf16 without fp32 masters", "LoRA", "more GPUs"
    ]  # fmt: skip
    assert [ranks for *_, ranks in offers] == ["1", "1", "1", "1", "2"]
    assert all(label == "single" or "offload" in label for _, label, ranks in offers if ranks == "1")
    done = CliRunner().invoke(recommend, [*words])
    ways = [line for line in done.stdout.splitlines() if re.match(r"- .* on \d ranks?, micro-batch", line)]
    assert [way.removeprefix("- ").partition(",")[0].partition(":")[0] for way in ways] == [
        "8-bit AdamW", "bf16 without fp32 masters", "LoRA", "more GPUs"
    ]  # fmt: skip
    assert all(": single on 1 rank, " in way for way in ways[:-1])


def test_a_frozen_base_is_planned_in_bf16_and_said_so() -> None:
    words = ("--model", "meta-llama/Llama-2-7B", "--gpu", "A100-80", "--backends", "fsdp")
    default, wide, narrow = (
        said(*words, settings=("adapter.kind=lora", *given))
        for given in ((), ("adapter.base_dtype=null",), (BF16_BASE,))
    )
    # 6.74e9 weights of 4 and of 2 bytes
    assert default[0] == narrow[0] != wide[0]
    assert "adapter.base_dtype=bf16, since none is given, " in " ".join(default)
    assert "13.5 GB a copy (fp32: 27.0)" in " ".join(default)
    note = (
        "adapter.base_dtype is not given, so all but DeepSpeed keep the frozen base in fp32: 27.0 GB a copy; "
    )
    assert f"{note}adapter.base_dtype=bf16 makes it 13.5" in " ".join(wide)
    assert "adapter.base_dtype is not given" not in " ".join(narrow)


def test_what_leaves_no_room_for_the_allocator_is_no_fit() -> None:
    words = ("--model", "llama-3.1-8b", "--gpu", "A100-40")
    length = ("data.sequence_length=6784", LONG[1])
    first, *rest = said(*words, "--backends", "zero2", settings=length)
    assert ": zero2 barely fits, 41.9 of 42.4 GB" in first  # 1.2 % free
    assert any(part.startswith("What fits instead") for part in rest)
    first, *_ = said(*words, "--backends", "zero1,zero2,zero3,fsdp", settings=length)
    assert ": use fsdp, " in first
    assert "zero3 and fsdp fit; " in first.replace("zero3, fsdp", "zero3 and fsdp")
    assert first.endswith("; zero2 barely")


def test_offload_says_what_of_a_step_the_host_takes() -> None:
    words = ("--model", "llama-2-7b", "--gpu", "A100-40", "--world-size", "1")
    first, *rest = said(*words, "--backends", "zero3:offload=cpu")
    seconds = float(first.rpartition("about ")[2].split()[0].replace(",", ""))
    told = (
        r"zero3:offload=cpu: comp\. s includes (\S+) s of optimizer step on the host, (\S+) s between device"
    )
    (found,) = re.findall(told, " ".join(rest))
    update, link = map(float, found)
    assert update + link < 4096 / seconds * 1.05  # the step, whose rate has two digits
    assert update > link > 0


def test_several_nodes_without_a_network_get_that_of_machines_of_the_gpu_by_name() -> None:
    words = ("--model", "llama-3.1-8b", "--gpu", "A100-80", "--world-size", "16")
    first, *rest = said(*words)
    assert first.startswith(
        "16 ranks, micro-batch 1, accumulation 1, if nodes are joined by HDR200 (--fabric): use "
    )
    assert "--fabric=HDR200, since none is given: InfiniBand HDR" in " ".join(rest)
    assert "largest assumption: nodes are joined by HDR200, which gives its line rate" in " ".join(rest)
    named, *_ = said(*words, "--fabric", "HDR200")
    assert named == first.replace(", if nodes are joined by HDR200 (--fabric)", "")


def test_recommend_offers_a_chunked_loss_that_gives_room_and_that_estimate_predicts_the_same() -> None:
    words = ["--model", "llama-3.1-8b", "--gpu", "A100-80", "--gpus", "8"]
    done = CliRunner().invoke(recommend, [*words, "--json"])
    document = json.loads(done.stdout)
    best, offer = document["best"][0], document["chunked_loss"]
    assert (best["backend"], best["tight"]) == ("zero1", True)
    assert (offer["loss.chunk_tokens"], offer["best"]["backend"], offer["best"]["tight"]) == (
        1024, "zero1", False,
    )  # fmt: skip
    # logits of 4,096 tokens x 128,256: 2.1 GB a copy in fp32
    assert 2 * 2.1e9 < best["device_bytes"] - offer["best"]["device_bytes"] < 4 * 2.1e9
    told = " ".join(done.stderr.split())
    assert "With a chunked loss (loss.chunk_tokens=1024): zero1, micro-batch 1, " in told
    batch = ["--set", "training.micro_batch_size=1", "--set", "training.accumulation_steps=64"]
    chunked = [*words, *batch, "--set", "loss.chunk_tokens=1024", "--backends", "zero1", "--json"]
    (row,) = json.loads(CliRunner().invoke(estimate, chunked).stdout)["rows"]
    assert row["device_bytes"] == offer["best"]["device_bytes"]
    assert row["tokens_per_second_per_gpu"] == offer["best"]["tokens_per_second_per_gpu"]


def test_recommend_offers_no_chunked_loss_where_logits_decide_nothing() -> None:
    words = ["--model", "llama-2-7b", "--gpu", "A100-40", "--gpus", "8", "--json"]
    assert json.loads(CliRunner().invoke(recommend, words).stdout)["chunked_loss"] is None
