"""Code that a model's folder brings (`auto_map` of its config.json): run only where the job says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.file_lock import locked
from harness.spec import Job
from harness.spec.model import CODE_SWITCH

LOCK_NAME = "harness.lock"


def class_in_folder(job: Job, config: Any, auto_class: str) -> bool:
    """Whether the job lets the folder's own class stand for transformers' `auto_class`."""
    return job.model.trust_remote_code and auto_class in (getattr(config, "auto_map", None) or {})


def code_arguments(job: Job, config: Any, auto_class: str) -> dict[str, Any]:
    """What `from_config` is told of the folder's code; by default a hub's main branch gives it."""
    told: dict[str, Any] = {"trust_remote_code": job.model.trust_remote_code}
    if class_in_folder(job, config, auto_class) and job.model.revision is not None:
        told["code_revision"] = job.model.revision
    return told


@contextmanager
def one_at_a_time(job: Job) -> Iterator[None]:
    """Let one rank of a machine load the folder's code: transformers copies it to a cache that all share."""
    if not job.model.trust_remote_code:
        yield
        return
    from transformers.dynamic_module_utils import HF_MODULES_CACHE  # type: ignore[attr-defined]

    folder = Path(HF_MODULES_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK_NAME):
        yield


def why_refused(name: str, error: Exception, *, setting: str = "model.name") -> str | None:
    """One line if loading failed only because the job does not let the folder's code run."""
    if "trust_remote_code" not in str(error):
        return None
    if setting != "model.name":
        return (
            f"{setting} '{name}' contains custom code, which runs for the model's own tokenizer only; save "
            "it as tokenizer.json, or leave data.tokenizer out"
        )
    return (
        f"{setting} '{name}' contains custom code (auto_map in its config.json), which must run to load it; "
        f"read that code, then set {CODE_SWITCH}: true, or give a model that transformers knows"
    )
