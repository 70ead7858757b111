"""What `harness estimate` says first, as an engineer asks it, and that what follows says the same."""

import json
import re

import pytest
from click.testing import CliRunner

from harness.cli.estimate import estimate, recommend

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=60)]
BF16_BASE = "adapter.base_dtype=bf16"


def said(*words: str, settings: tuple[str, ...] = ()) -> list[str]:
    """The answer at micro-batches of one sample unless told otherwise, and the paragraphs after it, each on
    one line."""
    batch = () if any("micro_batch_size" in text for text in settings) else ("training.micro_batch_size=1",)
    given = [word for text in (*settings, *batch) for word in ("--set", text)]
    done = CliRunner().invoke(estimate, [*words, *given])
    assert done.exit_code == 0, done.output
    return [" ".join(part.split()) for part in done.stdout.split("\n\n")]


def test_one_gpu_needs_no_library() -> None:
    first, *_ = said("--model", "llama-3.2-1b", "--gpu", "A100-80", "--world-size", "1")
    assert first.startswith("1 rank, micro-batch 1, accumulation 1: use single, 32.8 of 85.1 GB, about ")
    assert "Runner-up" not in first


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
