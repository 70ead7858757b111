"""What CUDA_VISIBLE_DEVICES names, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping

SELECTORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def selected(text: str) -> list[str]:
    """The devices that a value names. CUDA ends the list at the first that is empty or negative."""
    names: list[str] = []
    for name in (piece.strip() for piece in text.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


def hiding(environment: Mapping[str, str]) -> str | None:
    """The variable that hides all GPUs, as it is set; None: none does."""
    for name in SELECTORS:
        if name in environment and not selected(environment[name]):
            return f"{name}='{environment[name]}'"
    return None


def fault_of_selection(environment: Mapping[str, str], count: int) -> str | None:
    """Why the selection is not what it seems; None: nothing is wrong.

    count: devices that CUDA shows a process with this environment.
    """
    for variable in SELECTORS:
        if variable not in environment:
            continue
        text = environment[variable]
        names, given = selected(text), f"{variable}={text}"
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            return f"{given} names device {twice} more than once; name each once"
        if len(names) <= count:
            continue
        if sum(name.startswith("MIG") for name in names) > 1:
            return (
                f"{given} names {len(names)} MIG instances, of which CUDA shows a process {count}: ranks "
                "would have to share; name one and run one rank, or use undivided GPUs"
            )
        return (
            f"{given}: CUDA finds {count} of the {len(names)} named (it stops at the first not there); "
            "name devices of this machine"
        )
    return None
