from harness.judge.comparison import Comparison
from harness.judge.findings.finding import ROLES, role_of
from harness.tell.document import Folded, Items, Table
from harness.tell.outline import details_document
from harness.tell.sections.results import MOST_OF_A_KIND, findings_section, flat
from harness.tell.writers.markdown import render_markdown
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights


def test_figures_have_names_and_units_and_no_brackets() -> None:
    values = {
        "measured_bytes": 4000,
        "data_share": 0.4,
        "median_seconds": {"0": 0.5, "1": 0.25},
        "reference": None,
        "parameters": ["a", "b"],
        "differences": [{"op": "all_reduce", "expected_bytes": 8}, {"op": "broadcast"}],
        "exceeded": {"norm": [1.0, 1e-5]},
        "trains": True,
    }
    assert list(flat(values)) == [
        ("measured", "4,000 bytes"),
        ("data", "40 %"),
        ("median, 0", "500 ms"),
        ("median, 1", "250 ms"),
        ("parameters", "a, b"),
        ("differences 1, op", "all_reduce"),
        ("differences 1, expected", "8 bytes"),
        ("differences 2, op", "broadcast"),
        ("exceeded, norm", "1, allowed 1e-05"),
        ("trains", "on"),
    ]


def test_causes_are_told_before_divergence_and_each_is_explained_in_the_report() -> None:
    steps = make_steps(norms=[norm * 2 for norm in NORMS])
    other = make_record(label="zero1", steps=steps, final_weights=make_weights("c" * 64))
    comparison = Comparison([make_record(), other])
    document = details_document(comparison)
    text = render_markdown(document, {picture.key: picture.key for picture in document.pictures()}, "", "")
    section = text.partition("\n## Findings")[2].partition("\n## ")[0]
    assert section.index("**gradient-scale**") < section.index("**diverged**")
    assert "### Causes" in section
    assert "### Consequences" in section
    assert "Fix: Divide in one place only." in section
    assert '{"' not in section
    assert [block.title for block in findings_section(comparison).blocks if hasattr(block, "title")] == [
        "Meaning of each finding, how to confirm and fix it",
        "Figures behind the findings",
    ]


def test_findings_of_repeats_and_of_cells_alike_are_told_once_and_many_are_folded() -> None:
    labels = [f"zero{stage}" for stage in range(4)]
    worse = [
        make_record(
            label=label, repeat=repeat, run_id=f"{label}-{repeat}",
            steps=make_steps([loss + size for loss in LOSSES]), final_weights=make_weights("c" * 64),
        )
        for size, label in enumerate([*labels, "ddp", "fsdp"], start=1)
        for repeat in range(3)
    ]  # fmt: skip
    alike = make_record(label="fsdp1", steps=worse[0].steps, final_weights=make_weights("c" * 64))
    blocks = findings_section(Comparison([make_record(), *worse, alike])).blocks
    open_ = [item for block in blocks if isinstance(block, Items) for item in block.items]
    assert 0 < len(open_) <= MOST_OF_A_KIND * len({name for name, _ in open_})
    more = next(block for block in blocks if isinstance(block, Folded))
    assert more.title.startswith("More of the same kinds: ")
    figures = next(b for b in blocks if isinstance(b, Folded) and b.title.startswith("Figures"))
    (table,) = figures.blocks
    assert isinstance(table, Table)
    lines = [tuple(line) for line in table.rows]
    assert len(lines) == len(set(lines))
    assert any(cells == "zero0 and fsdp1 on 2 ranks" for _, cells, _, _ in lines)
    roles = [list(ROLES).index(role_of(name)) for name, *_ in lines]
    assert roles == sorted(roles)
