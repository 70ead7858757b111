"""The JSON document: its keys, and that its figures belong together."""

import json

import pytest

from harness.plan.answer import answers
from harness.plan.document import document
from tests.harness.plan.plans import ask

KEYS = {
    "backend", "world_size", "weights_bytes", "gathered_bytes", "gradients_bytes", "optimizer_bytes",
    "activation_bytes", "peak_bytes", "sent_bytes_per_step", "sent_bytes_between_nodes_per_step", "fits",
    "formulae",
}  # fmt: skip


def test_rows_have_the_keys_of_the_stable_surface() -> None:
    asked = ask("training.precision=bf16-mixed", backends="ddp fsdp single", gpu="A100-80")
    found = json.loads(json.dumps(document(answers(asked))))
    assert {"model", "parameters", "rows"} <= found.keys()
    assert found["parameters"] == 559_214_592
    assert all(found["rows"][index].keys() >= KEYS for index in range(3))
    assert found["rows"][2]["unsupported"] == "one process only, not 8"
    assert found["rows"][2]["peak_bytes"] is None


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp-hybrid"])
def test_lines_of_a_row_add_up(backend: str) -> None:
    asked = ask("training.precision=bf16-mixed", backends=backend, gpu="A100-80")
    (row,) = document(answers(asked))["rows"]
    lines = row["formulae"]

    def total(begin: str, unit: str = "bytes") -> float:
        return sum(line[unit] for line in lines if line["quantity"].startswith(begin))

    assert total("memory, ") == row["peak_bytes"]
    assert total("memory") == row["device_bytes"]
    assert total("sent, ") == row["sent_bytes_per_step"] == sum(c["sent_bytes"] for c in row["collectives"])
    assert total("computing: ", "seconds") == pytest.approx(row["computing_seconds"])
    assert sum(row["moments"][row["decisive_moment"]].values()) == row["peak_bytes"]
    assert row["margin_bytes"] == 85_094_039_552 - row["device_bytes"]
    assert row["fits"] is (row["margin_bytes"] >= 0)
    assert all(line["source"] for line in lines)


def test_masters_belong_to_the_optimizer() -> None:
    asked = ask("training.precision=bf16-mixed", backends="zero3")
    (row,) = document(answers(asked))["rows"]
    assert row["optimizer_bytes"] == sum(row["optimizer_parts"].values())
    parts = (row[f"{name}_bytes"] for name in ("weights", "gradients", "optimizer"))
    assert row["model_state_bytes"] == sum(parts)


MIXED = "training.precision=bf16-mixed"
