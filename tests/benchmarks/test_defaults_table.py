from typing import Any

import pytest

from benchmarks.defaults_table import PAGE, ROWS, Read, UnknownDefault, libraries, with_defaults
from harness.backends import presets
from harness.judge.wording import entries


def test_the_page_has_the_defaults_of_the_installed_libraries() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_defaults(page) == page


def test_a_default_without_words_is_refused() -> None:
    cell = Read(library="deepspeed", key="gradient_clipping", means={"1.0": "norm at most 1"})
    assert cell.cell({"deepspeed": {"gradient_clipping": 1.0}}) == "norm at most 1 (`gradient_clipping` 1.0)"
    with pytest.raises(UnknownDefault, match=r"gradient_clipping = 0\.5"):
        cell.cell({"deepspeed": {"gradient_clipping": 0.5}})


def test_each_finding_of_the_table_exists() -> None:
    named = {words.split("]")[0].strip(" [") for row in ROWS for words in str(row[-1]).split(",") if words}
    assert named <= set(entries())
    assert "clipping-differs" in named


def test_presets_name_the_defaults_that_the_libraries_have() -> None:
    found: dict[str, Any] = libraries()["stage 3"]
    changed = {
        change.setting: change.default for change in presets.zero_changes(3, "fp32", "like-for-like", 100)
    }
    in_stage_3 = {setting: default for setting, default in changed.items() if setting in found}
    assert len(in_stage_3) == 5
    assert {setting: found[setting] for setting in in_stage_3} == in_stage_3
