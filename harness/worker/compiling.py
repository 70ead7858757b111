"""torch.compile of a job's blocks, and what the compiler did."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.backends.blocks import transformer_blocks


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place, which leaves names as they are. Raises Unsupported without blocks."""
    for block in transformer_blocks(model).values():
        block.compile()


def pin_compiler(device: str) -> None:
    """On the CPU compile in this process: workers of the compiler's own would outlive a killed rank."""
    from torch._inductor import config

    if device == "cpu":
        config.compile_threads = 1


def is_compiled(module: nn.Module) -> bool:
    """Whether a module within is compiled, in place or by a wrapper."""
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def compiler_facts() -> dict[str, Any]:
    """What the compiler did in this process: graphs, breaks between them, and frames compiled again."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    return {
        "compiled_graphs": int(counters["stats"]["unique_graphs"]),
        "graph_breaks": int(sum(counters["graph_break"].values())),
        "recompilations": sum(1 for metric in get_compilation_metrics() if metric.recompile_reason),
    }
