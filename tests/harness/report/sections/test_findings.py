from harness.compare.rows import make_rows
from harness.report.contents import comparison
from harness.report.sections.findings import findings_section, flat
from harness.report.writers.markdown import render_markdown
from tests.records import NORMS, make_record, make_steps, make_weights


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
    rows = make_rows([make_record(), other])
    document = comparison(rows)
    text = render_markdown(document, {picture.key: picture.key for picture in document.pictures()}, "")
    section = text.partition("\n## Findings")[2].partition("\n## ")[0]
    assert section.index("**gradient-scale**") < section.index("**diverged**")
    assert "### Causes" in section
    assert "### Consequences" in section
    assert "How to mend it: Decide on one place that divides." in section
    assert '{"' not in section
    assert [block.title for block in findings_section(rows).blocks if hasattr(block, "title")] == [
        "What each of these findings means, how to confirm it and how to mend it",
        "The figures behind the findings",
    ]
