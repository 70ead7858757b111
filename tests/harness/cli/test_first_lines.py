"""What `harness estimate` notes below its answer, and the chunked loss that `recommend` offers."""

import json

import pytest
from click.testing import CliRunner

from harness.cli.estimate import estimate, recommend

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=60)]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        # 6.74e9 weights of 4 and of 2 bytes
        ("--set adapter.kind=lora", "adapter.base_dtype=bf16, since none is given, "),
        ("--set adapter.kind=lora", "13.5 GB a copy (fp32: 27.0)"),
        ("--set adapter.kind=lora --set adapter.base_dtype=null",
         "keep the frozen base in fp32: 27.0 GB a copy; adapter.base_dtype=bf16 makes it 13.5"),
        ("--world-size 1 --backends zero3:offload=cpu",
         "zero3:offload=cpu: comp. s includes 27 s of optimizer step on the host, 3.24 s between device"),
    ],
)  # fmt: skip
def test_what_an_answer_assumes_or_includes_is_noted(words: str, note: str) -> None:
    asked = "--model llama-2-7b --gpu A100-40 --set training.micro_batch_size=1 --backends fsdp"
    assert note in " ".join(CliRunner().invoke(estimate, f"{asked} {words}".split()).stdout.split())


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
