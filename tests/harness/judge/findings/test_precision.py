from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import BackendPart, ObservedPart, Record
from tests.records import make_effective, make_record


def run(label: str, precision: str = "fp32", **effective: Any) -> Record:
    backend = BackendPart(label=label, name=label, effective=make_effective(**effective), native_config={})
    return make_record(label=label, backend=backend, training={"precision": precision})


def found(precision: str = "fp32", *, reference: dict[str, Any], given: dict[str, Any]) -> list[Finding]:
    return Comparison([run("single", precision, **reference), run("ddp", precision, **given)]).findings


def test_matrix_products_in_another_dtype() -> None:
    (finding,) = found(reference={"autocast_dtype": None}, given={"autocast_dtype": "bfloat16"})
    assert finding.id == "compute-dtype-differs"
    assert finding.message == (
        "ddp on 2 ranks: dtype of computation differs: bfloat16 against float32 in the reference"
    )


def test_autocast_and_cast_weights_compute_in_the_same_dtype() -> None:
    reference = {"autocast_dtype": "bfloat16"}
    given = {"autocast_dtype": None, "parameter_dtype": "bfloat16"}
    assert found("bf16-mixed", reference=reference, given=given) == []


@pytest.mark.parametrize("key", ["gradient_dtype", "accumulation_dtype"])
@pytest.mark.parametrize(
    ("precision", "given", "ids"),
    [
        ("fp32", "bfloat16", ["gradient-dtype-differs"]),
        ("bf16-mixed", "bfloat16", []),
        ("bf16-mixed", "float16", ["gradient-dtype-differs"]),
        ("fp32", "float32", []),
    ],
)
def test_gradients_in_a_dtype_that_the_job_does_not_call_for(
    key: str, precision: str, given: str, ids: list[str]
) -> None:
    told = found(precision, reference={key: "float32"}, given={key: given})
    assert [finding.id for finding in told] == ids


@pytest.mark.parametrize(
    ("reference", "given", "ids"),
    [
        (65536.0, None, ["loss-scaling-differs"]),
        (None, 1024.0, ["loss-scaling-differs"]),
        (65536.0, 32768.0, []),
        (None, None, []),
    ],
)
def test_a_scaler_in_one_of_them_only(reference: float | None, given: float | None, ids: list[str]) -> None:
    told = found("fp16-mixed", reference={"loss_scale": reference}, given={"loss_scale": given})
    assert [finding.id for finding in told] == ids


def test_another_optimizer() -> None:
    (finding,) = found(reference={"optimizer": "torch.AdamW"}, given={"optimizer": "torch.SGD"})
    assert finding.id == "optimizer-differs"
    assert "optimizer differs: torch.SGD against torch.AdamW" in finding.message


def test_accumulation_that_the_library_does_not_share_with_the_loop() -> None:
    (finding,) = Comparison([make_record(), run("ddp", accumulation_steps=4)]).findings
    assert finding.id == "accumulation-differs"
    assert finding.values == {"asked": 1, "given": 4}


def layers(label: str, precision: str, most: str, **otherwise: list[str]) -> Record:
    seen = ObservedPart(compute_dtype=most, products_otherwise=otherwise)
    return run(label, precision).model_copy(update={"observed": seen})


@pytest.mark.parametrize(
    ("precision", "most", "dtype", "named"),
    [
        ("bf16-mixed", "bfloat16", "float32", True),
        ("fp32", "float32", "bfloat16", True),
        ("bf16-mixed", "float32", "bfloat16", False),  # a library may cast more than autocast does
    ],
)
def test_single_layers_in_another_dtype(precision: str, most: str, dtype: str, named: bool) -> None:
    reference, given = layers("single", precision, most), layers("ddp", precision, most, **{dtype: ["a.b"]})
    told = [f.message for f in Comparison([reference, given]).findings if f.id == "compute-dtype-differs"]
    text = f"ddp on 2 ranks: dtype of computation differs in a.b: {dtype} against {most} in the reference"
    assert told == ([text] if named else [])


def test_layers_that_the_reference_computes_so_too_are_no_finding() -> None:
    both = [layers(label, "bf16-mixed", "bfloat16", float32=["router"]) for label in ("single", "ddp")]
    assert Comparison(both).findings == []
