"""The table of which settings of a job run under strategies whose ranks share samples."""

from __future__ import annotations

from docs.hooks.tables import table
from harness.backends import registry
from harness.job.config import load_experiment
from harness.job.pairs import AXES, why_refused

LABELS = tuple(name for name in registry.BUILT_IN if registry.mesh_of(name, 4).shares_samples)
RANKS = 4
NEEDS = {
    "data.document_attention=within": ("data.packed=true",),
    "adapter.kind=lora": ("adapter.rank=4", "adapter.targets=[q_proj,v_proj]"),
}
"""What a setting cannot be without."""
OFFLOAD = "offload=cpu"


def settings_of(setting: str) -> list[str]:
    """The setting and what it needs, as one types them."""
    return [setting, *NEEDS.get(setting, ())]


def refused(label: str, setting: str) -> str | None:
    """Why no rank starts; None: the pair runs."""
    return why_refused(label, RANKS, load_experiment(None, settings_of(setting)).job())


def has_offload(label: str) -> bool:
    """Whether the backend has an option to offload."""
    return "offload" in registry.parse(label)[0].options_class().model_fields


def pairs_table() -> str:
    """Rows of settings, columns of strategies; reasons below by number."""
    reasons: list[str] = []

    def cell(reason: str | None) -> str:
        if reason is None:
            return "runs"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    rows = [[f"`{name}`", *(cell(refused(label, name)) for label in LABELS)] for name in AXES]
    none = "the backend has no such option"
    rows.append([f"option `{OFFLOAD}`", *(cell(None if has_offload(name) else none) for name in LABELS)])
    head = ["setting", *(f"`{label}`" for label in LABELS)]
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{table(head, rows)}\n\n{notes}\n"
