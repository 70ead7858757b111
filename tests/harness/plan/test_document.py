"""The JSON document: its keys, and that its figures belong together."""

import json
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.plan.answer import answers, estimate
from harness.plan.document import (
    curves_of,
    document,
    estimate_picture,
    sizes_to_draw,
    write_picture,
)
from harness.tell.pictures.drawing import draw, plot_format
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


def test_one_number_of_ranks_is_drawn_over_powers_of_two_that_fill_nodes() -> None:
    assert sizes_to_draw(ask(world_sizes=(48,), per_node=4)).world_sizes == (1, 2, 4, 8, 16, 32, 48)
    assert sizes_to_draw(ask(world_sizes=(2, 8))).world_sizes == (2, 8)


def test_strategies_with_equal_figures_share_a_curve() -> None:
    asked = ask(MIXED, backends="ddp accelerate-ddp fsdp", world_sizes=(2, 4), gpu="A100-80")
    curves = curves_of(estimate(asked))
    assert [curve.name for curve in curves] == ["ddp, accelerate-ddp", "fsdp"]
    assert [row.world_size for row in curves[0].rows] == [2, 4]


def test_every_strategy_and_the_limit_are_named() -> None:
    asked = ask(MIXED, backends="fsdp ddp", world_sizes=(2, 4), gpu="A100-80")
    svg = draw(estimate_picture(asked, estimate(asked))).decode()
    for text in ("fsdp", "ddp", "A100-80: 85.1 GB", "tokens/s per GPU", "exposed communication"):
        assert text in svg


def test_without_a_gpu_only_memory_is_drawn_of_rows_that_were_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask(MIXED, world_sizes=(2, 4))
    rows = estimate(asked)
    monkeypatch.setattr("harness.plan.document.estimate", lambda _: pytest.fail("estimated a second time"))
    write_picture(rows, [asked], tmp_path / "picture.svg")
    svg = (tmp_path / "picture.svg").read_text()
    assert "GB of memory per rank" in svg
    assert "tokens/s" not in svg


def test_another_format_or_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"given 'a\.pdf'; give a name that ends with \.svg or \.png"):
        plot_format(Path("a.pdf"))
    asked = ask(MIXED, world_sizes=(2, 4))
    with pytest.raises(HarnessError, match="cannot be written"):
        write_picture(estimate(asked), [asked], tmp_path / "none" / "picture.svg")
