"""Ranks that share samples are one data rank: what is compared of them, and what is found of them."""

from typing import Any

import pytest

from harness.judge.agreement.causes import name_scale, sums_of_step
from harness.judge.agreement.job_equivalence import job_differences
from harness.judge.comparison import Comparison
from harness.judge.rows import place_to_compare
from harness.record import DimensionPart, ObservedPart, Record
from harness.tell.document import Items
from harness.tell.sections.results import levels_section
from tests.records import make_ranks, make_record, make_steps, make_weights


def first(reference: dict[str, Any], given: dict[str, Any]) -> str:
    return job_differences(make_record(**reference), make_record(label="ddp", **given))[0].differs


def digests(sample: str) -> dict[str, Any]:
    return {"ranks": make_ranks(1, batch_digests=[[[sample]]])}


def began(body: float, head: float) -> dict[str, Any]:
    sketch = {name: [size, *[size, -size] * 4] for name, size in (("body", body), ("head", head))}
    return {"initial_weights": make_weights(f"{body} {head}".ljust(64), sketch)}


@pytest.mark.parametrize(
    ("reference", "given", "clause"),
    [
        ({}, {"initial_weights": make_weights("d" * 64)}, "initial weights differ"),
        (began(1.0, 0.5), began(1.0, 0.7), "initial weights of head differ"),
        (began(1.0, 0.5), began(1.0 + 1e-6, 0.7), "initial weights of head differ"),
        (began(1.0, 0.5), began(1.2, 0.7), "initial weights differ"),
        (digests("a"), digests("b"), "samples of step 0 differ"),
        ({}, {"steps": make_steps(changes={3: {"samples": 7}})}, "samples of step 3 differ"),
        ({}, {"steps": make_steps()[:3]}, "number of steps differs"),
        ({}, {"observed": ObservedPart(optimizer_steps=2)}, "optimizer steps differ"),
        ({}, {"steps": make_steps(changes={2: {"learning_rate": 1.0}})}, "learning rate of step 2 differs"),
        (
            {"steps": make_steps(changes={n: {"learning_rate": n + 1.0} for n in range(4)})},
            {"steps": make_steps(changes={n: {"learning_rate": max(n, 1.0)} for n in range(4)})},
            "learning rate of step 1 (a step late) differs",
        ),
        ({}, {"job_id": "b" * 12, "training": {"steps": 5}}, "training.steps differs"),
        ({}, {"steps": make_steps(changes={1: {"target_tokens": 9}})}, "target_tokens of step 1 differs"),
    ],
)
def test_every_field_has_the_verb_of_its_number(
    reference: dict[str, Any], given: dict[str, Any], clause: str
) -> None:
    assert first(reference, given) == clause


def groups(rates: dict[str, float], steps: int = 4) -> dict[str, Any]:
    """A run whose optimizer holds each parameter in a group of its own, with a rate of its own."""
    return {
        "observed": ObservedPart(
            optimizer_groups=[{"parameters": [name]} for name in rates],
            learning_rates=[[rate] * steps for rate in rates.values()],
        )
    }


def test_rates_are_compared_by_parameter_whatever_the_order_of_the_groups() -> None:
    rates = {"a": 1e-3, "b": 5e-4}
    swapped = dict(reversed(rates.items()))
    assert job_differences(make_record(**groups(rates)), make_record(label="ddp", **groups(swapped))) == []
    (found,) = job_differences(
        make_record(**groups(rates)), make_record(label="ddp", **groups({**rates, "b": 1e-3}))
    )
    assert found.field == "learning rate of step 0 for 1 parameter, such as b"
    assert (found.reference, found.given) == (5e-4, 1e-3)


def kernels(label: str, *, asked: bool, seen: bool, number: int = 0) -> Record:
    return make_record(
        label=label, repeat=number, run_id=f"{label}-{asked}-{number}", training={"deterministic": asked},
        observed=ObservedPart(deterministic=seen),
    )  # fmt: skip


def test_kernels_that_a_library_makes_random_are_another_job() -> None:
    reference = kernels("single", asked=True, seen=True)
    (found,) = job_differences(reference, kernels("ddp", asked=True, seen=False))
    assert (found.field, found.given) == ("deterministic kernels", False)
    assert job_differences(reference, kernels("ddp", asked=False, seen=False)) == []


def test_runs_with_the_kernels_that_jobs_use_name_the_run_that_shows_parity() -> None:
    """They are another cell of the same job, and judged by the deterministic reference."""
    fast = [kernels("ddp", asked=False, seen=False, number=n) for n in range(2)]
    alone = kernels("fsdp", asked=False, seen=False)
    comparison = Comparison(
        [kernels("single", asked=False, seen=False), kernels("single", asked=True, seen=True),
         kernels("ddp", asked=True, seen=True), *fast, alone]
    )  # fmt: skip
    assert comparison.not_comparable.rows == []
    assert {row.reference.record.run_id for row in comparison.rows if row.reference} == {"single-True-0"}
    shown = {row["run_id"]: row["parity_run"] for row in comparison.as_json()["rows"]}
    assert shown["ddp-False-0"] == shown["ddp-False-1"] == shown["ddp-True-0"] == "ddp-True-0"
    assert shown["fsdp-False-0"] == "fsdp-False-0"
    labels = {group.label: len(group.rows) for group in comparison.groups if group.world_size == 2}
    assert labels == {"ddp (deterministic)": 1, "ddp (not deterministic)": 2, "fsdp (not deterministic)": 1}
    assert place_to_compare(comparison.groups) == ("0123456789ab", 2, "not deterministic")
    section = levels_section(comparison)
    lines = [line.text for block in section.blocks if isinstance(block, Items) for line in block.lines()]
    assert [line for line in lines if line.startswith(("ddp", "fsdp"))] == [
        "ddp (not deterministic) on 2 ranks: ddp-True-0",
        "fsdp (not deterministic) on 2 ranks: its own losses, no other run",
    ]


def laid_out(*sizes: tuple[Any, int], **fields: list[Any]) -> Record:
    """A record on 4 ranks; `fields`: of each rank."""
    world = {"dimensions": [DimensionPart(name=name, size=size) for name, size in sizes]}
    return make_record(label="tp", world_size=4, world=world, ranks=make_ranks(4, **fields))


def reference() -> Record:
    return make_record(ranks=make_ranks(1, batch_digests=[[["a", "b"]]], batch_hash_sums=[["3"]]))


@pytest.mark.parametrize(
    ("sizes", "digests", "sums"),
    [
        ((("data", 2), ("tensor", 2)), [[["a"]], [["a"]], [["b"]], [["b"]]], [["1"], ["1"], ["2"], ["2"]]),
        # Stages that see no batch are passed over.
        ((("pipeline", 2), ("data", 2)), [[[]], [[]], [["a"]], [["b"]]], [[None], [None], ["1"], ["2"]]),
    ],
)
def test_peers_with_the_same_samples_are_the_reference_s_job(sizes: Any, digests: Any, sums: Any) -> None:
    record = laid_out(*sizes, batch_digests=digests, batch_hash_sums=sums)
    assert job_differences(reference(), record) == []


@pytest.mark.parametrize(
    ("given", "loaded", "told"),
    [
        (["c", "d"], "0", "2 of them loaded alike, but with other tokens or labels in the model"),
        (["c", "b"], "0", "1 of them loaded alike, but with other tokens or labels in the model"),
        (["c", "d"], "1", "2 of them repeated or foreign, 2 of the reference's missing"),
        (["a", "a"], "0", "1 of them repeated or foreign, 1 of the reference's missing"),
        (["a"], "0", "0 of them repeated or foreign, 1 of the reference's missing"),
    ],
)
def test_samples_that_change_between_loader_and_model_are_told(
    given: list[str], loaded: str, told: str
) -> None:
    single, record = (
        make_record(
            label=label, ranks=make_ranks(1, batch_digests=[[seen]]),
            steps=make_steps(changes={n: {"sample_hashes": hashes * 16} for n in range(4)}),
        )
        for label, seen, hashes in (("single", ["a", "b"], "0"), ("ddp", given, loaded))
    )  # fmt: skip
    found, *_ = job_differences(single, record)
    assert found.given == f"{len(given)} samples, {told}"


def test_peers_with_different_samples_are_found() -> None:
    record = laid_out(
        ("data", 2), ("tensor", 2),
        batch_digests=[[["a"]], [["b"]], [["c"]], [["d"]]], batch_hash_sums=[["1"], ["2"], ["3"], ["4"]],
    )  # fmt: skip
    (difference,) = job_differences(reference(), record)
    assert difference.kind == "peers-fed-differently"
    assert difference.reference == "the same on ranks 0, 1"


def test_losses_of_tensor_ranks_count_once_and_parts_add_up() -> None:
    losses = [[1.0], [1.0], [2.0], [2.0]]
    assert sums_of_step(laid_out(("data", 2), ("tensor", 2), loss_sums=losses), 0, "loss_sums") == [1.0, 2.0]
    parts = [[1.0], [2.0], [4.0], [8.0]]
    assert sums_of_step(laid_out(("data", 2), ("sequence", 2), loss_sums=parts), 0, "loss_sums") == [
        3.0,
        12.0,
    ]


def test_a_factor_of_the_ranks_that_share_samples_is_named() -> None:
    mesh = laid_out(("data", 1), ("sequence", 4)).world.mesh
    assert name_scale(4.0, mesh, 1) == ["added up 4 times over the 4 ranks along 'sequence'"]
