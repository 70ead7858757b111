import subprocess
from pathlib import Path

import pytest

from harness.record import provenance
from harness.record.provenance import (
    MEASURING_SOURCES,
    ROOT,
    content_digest,
    git_state,
    machine_name,
    measuring_files,
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A committed tree with both packages, a page and a published report."""
    for name in ("backends/a.py", "harness/b.py", "README.md", "reports/default/report.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("first\n", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("__pycache__/\n", encoding="utf-8")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)
    return tmp_path


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("second\n", encoding="utf-8")


def test_what_lies_beside_the_packages_is_no_local_change(checkout: Path) -> None:
    for name in ("reports/new/report.md", "reports/default/report.md", "README.md", "notes.txt"):
        write(checkout / name)
    write(checkout / "harness" / "__pycache__" / "b.pyc")
    state = git_state(checkout)
    assert (state.modified, state.changed) == (False, [])
    assert len(state.commit) == 40


def test_every_file_of_a_package_that_is_not_the_commits_is_named(checkout: Path) -> None:
    write(checkout / "harness" / "b.py")
    write(checkout / "backends" / "new.py")
    (checkout / "backends" / "a.py").unlink()
    state = git_state(checkout)
    assert state.modified
    assert state.changed == ["backends/a.py", "backends/new.py", "harness/b.py"]


def test_outside_of_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("name", MEASURING_SOURCES)
def test_fingerprint_of_the_code_is_of_sources_that_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_tables_that_a_cell_reads_are_part_of_the_fingerprint() -> None:
    found = {file.relative_to(ROOT).as_posix() for file in measuring_files()}
    assert {
        "harness/backends/presets.toml", "harness/backends/fsdp/fsdp2.py", "harness/job/pairs.toml",
    } <= found  # fmt: skip


def test_no_other_variable_of_the_environment_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "OMP_NUM_THREADS", "HOME_ADDRESS", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "set")
    recorded = provenance.environment().variables
    assert recorded["NCCL_DEBUG"] == recorded["OMP_NUM_THREADS"] == "set"
    assert not {"HOME_ADDRESS", "WANDB_API_KEY", "PATH"} & recorded.keys()


def test_files_of_a_folder_are_read_once_while_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = content_digest(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(provenance.hashlib, "file_digest", None)  # reading again would fail
        assert content_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert content_digest(tmp_path) != first


@pytest.mark.parametrize("tool", ["exec sleep infinity", "exit 9"])
def test_an_nvidia_smi_that_hangs_or_fails_ends_no_run(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{tool}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(provenance, "PATIENCE_SECONDS", 0.3)
    provenance._gpus.cache_clear()
    try:
        assert machine_name().endswith("; ")
    finally:
        provenance._gpus.cache_clear()
