"""Every key that the installed libraries know, against what they make of it themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.imported.read_defaults import BETWEEN
from harness.imported.reading import KEYS
from tests.harness.imported.files import accelerate
from tests.harness.imported.test_rows import rows_of
from tests.patience import SECONDS

ELSEWHERE = {
    "cpu_offload_param", "cpu_offload_use_pin_memory", "legacy_stage1", "memory_efficient_linear",
    "override_module_apply", "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params",
    "zero_quantized_gradients",
}  # fmt: skip
"""Read by other parts of DeepSpeed than the optimizer of a stage (`partition_parameters.py`, `engine.py`)."""
WITHOUT_GPU = {"fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading"}
"""Accelerate's plugin stops at one of them on a machine without a GPU, or at both if they disagree."""


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.harness.imported.library", request.param]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
    found: dict[str, Any] = json.loads(done.stdout.rpartition(BETWEEN)[2])
    return found


def verdict(folder: Path, kind: str, document: dict[str, Any], key: str) -> str:
    """'unknown', 'refused', 'without effect', 'taken' or 'pinned' of a row as given."""
    try:
        _, row = rows_of(folder, kind, document)
    except HarnessError as error:
        return "unknown" if "is unknown" in str(error) else "refused"
    (setting,) = [setting for setting in row.part.settings if setting.key == key]
    return "without effect" if (setting.handling, setting.used) == ("pinned", None) else setting.handling


@pytest.mark.long(seconds=20)
@pytest.mark.parametrize("library", ["deepspeed"], indirect=True)
def test_a_key_of_deepspeed_is_read_as_by_deepspeed(library: dict[str, Any], tmp_path: Path) -> None:
    wrong = []
    for stage, keys in library.items():
        assert len(keys) > 60
        for key, (value, parsed, passed) in keys.items():
            section, _, name = key.rpartition(".")
            document: dict[str, Any] = {"zero_optimization": {"stage": int(stage)}}
            if section:
                document.setdefault(section, {})[name] = value
            else:
                document[key] = value
            said = verdict(tmp_path, "deepspeed", document, key)
            rule = KEYS["deepspeed"].get(key)
            is_unused = rule is not None and rule.kind == "not_used"
            passed = "nothing" if (stage, section) == ("0", "zero_optimization") else passed
            if (
                said == "unknown"
                or (parsed == "refuses" and said != "refused")
                or (passed == "changes" and said == "without effect" and not is_unused)
                or (passed == "nothing" and said in ("taken", "pinned") and name not in ELSEWHERE)
            ):
                wrong.append((stage, key, value, parsed, passed, said))
    assert not wrong


@pytest.mark.long(seconds=20)
@pytest.mark.parametrize("library", ["accelerate"], indirect=True)
def test_a_key_of_fsdp_is_read_as_by_accelerate(library: dict[str, Any], tmp_path: Path) -> None:
    wrong = []
    for version, keys in library.items():
        assert len(keys) > 12
        for name, values in keys.items():
            rule = KEYS["accelerate"][f"fsdp_config.{name}"]
            is_read = any(made != "nothing" for _, made in values)
            for value, made in values:
                if name in WITHOUT_GPU:
                    continue
                section = {"fsdp_version": int(version), name: value}
                document = accelerate("fsdp1", section)
                del document["fsdp_config"]["fsdp_auto_wrap_policy"]
                document["fsdp_config"] |= section
                said = verdict(tmp_path, "accelerate", document, f"fsdp_config.{name}")
                if (
                    said == "unknown"
                    or (made == "refuses" and said != "refused")
                    or (made == "changes" and said == "without effect" and rule.kind != "not_used")
                    or (not is_read and said != "without effect")
                ):
                    wrong.append((version, name, value, made, said))
    assert not wrong
