"""The table says how each test of each lane ended."""

from pathlib import Path

import pytest

from tests.version_lanes.__main__ import table

JUNIT = """<testsuites><testsuite name="pytest">
<properties><property name="torch" value="2.13.0"/><property name="deepspeed" value="{version}"/></properties>
<testcase name="test_contract[ddp]"/>
<testcase name="test_contract[trainer-ddp]">{outcome}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("outcome", "cell", "note"),
    [
        ("", "pass", ""),
        (
            '<skipped message="unsupported: transformers 5.0 cannot"/>',
            "unsupported [1]",
            "transformers 5.0 cannot",
        ),
        ('<failure message="AssertionError: no&#10;more"/>', "fail [1]", "AssertionError: no"),
        ('<error message=""/>', "fail [1]", "error"),
    ],
)
def test_a_lane_is_a_line_with_versions_and_outcomes(
    outcome: str, cell: str, note: str, tmp_path: Path
) -> None:
    (tmp_path / "old.xml").write_text(JUNIT.format(version="0.18.0", outcome=outcome))
    (tmp_path / "pinned.xml").write_text(JUNIT.format(version="0.19.8", outcome=""))
    head, _, old, pinned, *rest = table(sorted(tmp_path.glob("*.xml"))).splitlines()
    assert head.endswith("| ddp | trainer-ddp |")
    assert old == f"| old | 2.13.0 | 0.18.0 | n/a | n/a | n/a | pass | {cell} |"
    assert pinned == "| pinned | 2.13.0 | 0.19.8 | n/a | n/a | n/a | pass | pass |"
    assert rest == (["", f"[1] {note}"] if note else [])


def test_a_version_that_is_wrong_as_known_is_not_a_mere_pass(tmp_path: Path) -> None:
    for version in ("0.18.0", "0.18.6"):
        text = JUNIT.format(version=version, outcome="").replace("[ddp]", "[zero2]")
        (tmp_path / f"{version}.xml").write_text(text)
    *_, old, new = table(sorted(tmp_path.glob("*.xml"))).splitlines()
    assert old.endswith("| wrong, as known | pass |")
    assert new.endswith("| pass | pass |")
