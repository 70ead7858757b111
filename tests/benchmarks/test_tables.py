"""Tables in pages are those of the installed libraries, the published records and the evidence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import defaults_table, equivalences, errors_table, offload_table, routes_table
from benchmarks.defaults_table import Read, UnknownDefault
from benchmarks.equivalences import held, same_states, traffic
from harness.backends import presets
from harness.judge.comparison import Comparison
from harness.judge.quantities import rank_states, volume_differences
from harness.judge.wording import entries
from tests.resume.test_pairs import LOSS_TOLERANCE

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROUTES = DOCS / "your-configuration.md"
EQUIVALENT, OFFLOADED = equivalences.records(), offload_table.records()
HELD = ("weights", "gathered", "gradients", "masters", "optimizer", "communication")


@pytest.mark.parametrize(
    ("page", "written"),
    [
        (defaults_table.PAGE, defaults_table.with_defaults),
        (equivalences.PAGE, lambda page: equivalences.page_with_tables(page, EQUIVALENT)),
        (DOCS / "planning.md", errors_table.with_table),
        (offload_table.PAGE, lambda page: offload_table.page_with_table(page, OFFLOADED)),
        (ROUTES, routes_table.with_table),
    ],
    ids=["defaults", "equivalences", "errors", "offload", "routes"],
)
def test_the_page_has_the_table_of_its_evidence(page: Path, written: Callable[[str], str]) -> None:
    text = page.read_text(encoding="utf-8")
    assert written(text) == text


def test_a_default_without_words_is_refused() -> None:
    cell = Read(library="deepspeed", key="gradient_clipping", means={"1.0": "norm at most 1"})
    assert cell.cell({"deepspeed": {"gradient_clipping": 1.0}}) == "norm at most 1 (`gradient_clipping` 1.0)"
    with pytest.raises(UnknownDefault, match=r"gradient_clipping = 0\.5"):
        cell.cell({"deepspeed": {"gradient_clipping": 0.5}})


def test_each_finding_of_the_table_of_defaults_exists() -> None:
    rows = defaults_table.ROWS
    named = {words.split("]")[0].strip(" [") for row in rows for words in str(row[-1]).split(",") if words}
    assert named <= set(entries())
    assert "clipping-differs" in named


def test_presets_name_the_defaults_that_the_libraries_have() -> None:
    found: dict[str, Any] = defaults_table.libraries()["stage 3"]
    changed = {
        change.setting: change.default for change in presets.zero_changes(3, "fp32", "like-for-like", 100)
    }
    in_stage_3 = {setting: default for setting, default in changed.items() if setting in found}
    assert len(in_stage_3) == 5
    assert {setting: found[setting] for setting in in_stage_3} == in_stage_3


def test_every_equivalent_moves_and_holds_what_its_closed_form_says() -> None:
    for label, record in EQUIVALENT.items():
        assert volume_differences(record) == [], label
        for rank in rank_states(record):
            assert rank.expected is not None, label
            assert rank.measured_bytes == rank.expected.model_state_bytes, label


def test_the_hybrids_hold_and_the_second_copies_move_the_same() -> None:
    fsdp1, fsdp2 = EQUIVALENT["fsdp1-hybrid:shard_size=2"], EQUIVALENT["fsdp-hybrid:shard_size=2"]
    kept = {key for key, size in traffic(fsdp2).items() if traffic(fsdp1)[key] != size}
    assert kept == {("weights, backward", "0, 1")}  # FSDP1 keeps the root gathered
    assert same_states(held(fsdp1), held(fsdp2))
    hpz, reshard = EQUIVALENT["zero3:hpz=2"], EQUIVALENT["fsdp:reshard=2"]
    assert traffic(hpz) == traffic(reshard)
    assert not same_states(held(hpz), held(reshard))
    assert held(hpz)["after_forward", "weights"] == held(reshard)["after_forward", "weights"]


def test_memory_of_every_offloading_rank_is_the_closed_form_to_the_byte() -> None:
    for label, record in OFFLOADED.items():
        for states in rank_states(record):
            assert states.expected is not None, label
            expected = states.expected.kinds()
            for kind in HELD:
                assert states.measured.get(kind, 0) == expected.get(kind, 0), (label, kind)


def test_every_offloading_row_trains_within_the_references_band() -> None:
    parities = {row.label: row.judgement.parity for row in Comparison(list(OFFLOADED.values())).rows}
    ran = {label for label, record in OFFLOADED.items() if record.status == "ok"}
    assert {parities[label] for label in ran} <= {"exact", "tight", "band"}


def test_routes_are_within_the_contract() -> None:
    page = ROUTES.read_text(encoding="utf-8")
    rows = [
        line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `") and line.count("|") == 6
    ]
    figures = {cells[0].strip(" `"): [cell.strip() for cell in cells[2:]] for cells in rows}
    assert list(figures) == routes_table.routes()
    assert {name for name, cells in figures.items() if "n/a" in cells} == {"trainer-fsdp", "trainer-fsdp1"}
    assert {len(cells) for cells in figures.values()} == {len(routes_table.PRECISIONS)}
    assert max(float(cells[0]) for cells in figures.values()) <= LOSS_TOLERANCE  # of fp32
