"""The table of docs/faq.md: defaults of DeepSpeed, FSDP and DDP, read from the installed libraries' objects.

Usage: python -m benchmarks.defaults_table
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.packed_page import DOCS, between, table
from harness.imported.read_defaults import deepspeed_defaults

PAGE = DOCS / "faq.md"
BEGIN, END = "<!-- defaults: python -m benchmarks.defaults_table -->", "<!-- end of defaults -->"
HEADERS = ("default of", "DeepSpeed ZeRO", "FSDP2 (`fully_shard`)", "FSDP1", "DDP", "finding")
OF_PARAMETERS = "that of the parameters"
SECTIONS = ("bf16", "fp16")
"""Of DeepSpeed's JSON, whose keys mean nothing alone."""


class UnknownDefault(Exception):
    """A library has a default that this table has no words for: its behaviour must be looked up."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """A default: where it stands, the library's name for it, and what its possible values mean.

    `means` by `repr` of the value; without it the value is shown itself.
    """

    library: str
    key: str
    means: Mapping[str, str] = field(default_factory=dict)
    after: str = ""

    def cell(self, libraries: Mapping[str, Mapping[str, Any]]) -> str:
        """Key, value and meaning. Raises KeyError if the library has no such setting, UnknownDefault."""
        value = libraries[self.library][self.key]
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        if self.means and repr(value) not in self.means:
            raise UnknownDefault(f"{self.library}: {self.key} = {value!r}")
        section = f"{self.library}." if self.library in SECTIONS else ""
        setting = f"`{section}{self.key}` {shown}"
        return f"{self.means[repr(value)]} ({setting})" if self.means else f"{setting}{self.after}"


Cell = Read | str
"""Words alone: the library has no such setting."""


def of_functions(*functions: Callable[..., Any]) -> dict[str, Any]:
    """Default of every argument that has one."""
    arguments = [one for made in functions for one in inspect.signature(made).parameters.values()]
    return {one.name: one.default for one in arguments if one.default is not one.empty}


def libraries() -> dict[str, dict[str, Any]]:
    """Settings with their defaults, of each object that the table reads."""
    found = deepspeed_defaults()
    backward = inspect.getclosurevars(DeepSpeedEngine.backward).nonlocals["func"]  # without its NVTX range
    return {
        "deepspeed": found["top"],
        "engine": of_functions(backward),
        "fp16": found["fp16"],
        "bf16": found["bf16"],
        "stages 1, 2": found["zero"]["2"],
        "stage 3": found["zero"]["3"],
        "fused": found["optimizers"]["fused"]["defaults"],
        "AdamW": found["optimizers"]["torch"]["defaults"],
        "fsdp2": of_functions(fully_shard),
        "policy": vars(MixedPrecisionPolicy()),
        "fsdp1": of_functions(FullyShardedDataParallel.__init__),
        "ddp": of_functions(DistributedDataParallel.__init__),
        "scaler": of_functions(torch.amp.GradScaler.__init__),
    }


def _row(name: str, zero: Cell, fsdp2: Cell, fsdp1: Cell, ddp: Cell, finding: str) -> Sequence[Cell]:
    return name, zero, fsdp2, fsdp1, ddp, ", ".join(f"[{one}](findings.md#{one})" for one in finding.split())


_NONE = repr(None)
ROWS: tuple[Sequence[Cell], ...] = (
    _row(
        "clipping of gradients",
        Read(library="deepspeed", key="gradient_clipping", means={"1.0": "norm at most 1", "0.0": "none"}),
        "none", "none", "none", "clipping-differs",
    ),
    _row(
        "fp32 masters of bf16 weights",
        Read(library="bf16", key="bf16_master_weights_and_grads", means={"False": "yes"}),
        "none: the optimizer updates the parameters as loaded", "as FSDP2", "as FSDP2",
        "master-dtype-differs lost-updates",
    ),
    _row(
        "compute dtype",
        Read(library="bf16", key="enabled", means={"False": "fp32"}),
        Read(library="policy", key="param_dtype", means={_NONE: OF_PARAMETERS}),
        Read(library="fsdp1", key="mixed_precision", means={_NONE: OF_PARAMETERS}),
        Read(library="ddp", key="mixed_precision", means={_NONE: OF_PARAMETERS}),
        "compute-dtype-differs",
    ),
    _row(
        "dtype in which gradients are reduced",
        Read(library="deepspeed", key="communication_data_type", means={_NONE: "the compute dtype"}),
        Read(library="policy", key="reduce_dtype", means={_NONE: "the compute dtype"}),
        "the compute dtype", "that of the gradients: fp32 under autocast", "reduce-dtype-differs",
    ),
    _row(
        "dtype in which micro-steps add up",
        Read(library="deepspeed", key="grad_accum_dtype", means={_NONE: "the compute dtype"}),
        OF_PARAMETERS, OF_PARAMETERS, OF_PARAMETERS, "gradient-dtype-differs",
    ),
    _row(
        "loss divided by the number of micro-steps",
        Read(library="engine", key="scale_wrt_gas", means={"True": "by the library"}),
        "by the program", "by the program", "by the program", "gradient-scale",
    ),
    _row(
        "gradients are reduced, with accumulation",
        "ZeRO-1 once a step, ZeRO-2 and 3 in each micro-step",
        "in each micro-step without `set_requires_gradient_sync(False)`",
        "in each micro-step without `no_sync`", "as FSDP1", "communication-differs",
    ),
    _row(
        "loss scale of fp16",
        Read(library="fp16", key="initial_scale_power", after=", as exponent of 2"),
        Read(library="scaler", key="init_scale"), "as FSDP2", "as FSDP2", "loss-scaling-differs",
    ),
    _row(
        "weight decay of AdamW",
        Read(library="fused", key="weight_decay", after=" in FusedAdam"),
        Read(library="AdamW", key="weight_decay", after=" in torch's"), "as FSDP2", "as FSDP2",
        "optimizer-differs",
    ),
    _row(
        "steps whose gradients are not finite",
        Read(library="bf16", key="check_grad_overflow", means={"True": "ZeRO-1, 2: skipped in bf16, too"}),
        "taken; with a `GradScaler` skipped", "as FSDP2", "as FSDP2", "skipped-steps",
    ),
    _row(
        "units that are gathered",
        "each module",
        "each module that the program gives it",
        Read(library="fsdp1", key="auto_wrap_policy", means={_NONE: "the whole model is one"}),
        "nothing is gathered", "one-wrap-unit",
    ),
    _row(
        "gathered weights are freed after the forward pass",
        Read(library="stage 3", key="stage3_max_live_parameters", after=" elements may stay"),
        Read(library="fsdp2", key="reshard_after_forward", means={_NONE: "yes, except the root's"}),
        Read(library="fsdp1", key="sharding_strategy", means={_NONE: "yes, except the root's"}),
        "", "",
    ),
    _row(
        "small parameters stay whole",
        Read(library="stage 3", key="stage3_param_persistence_threshold", after=" elements each"),
        "no", "no", "", "",
    ),
    _row(
        "gathered ahead",
        Read(library="stage 3", key="stage3_prefetch_bucket_size", after=" elements"),
        "the next unit",
        Read(
            library="fsdp1", key="backward_prefetch",
            means={"<BackwardPrefetch.BACKWARD_PRE: 1>": "the next unit, in the backward pass"},
        ),
        "", "",
    ),
    _row(
        "reduced beside the backward pass",
        Read(library="stages 1, 2", key="overlap_comm", means={"False": "stages 1 and 2: no"}),
        "yes", "yes", "yes", "",
    ),
    _row(
        "one reduction holds",
        Read(library="stage 3", key="reduce_bucket_size", after=" elements"),
        "a unit", "a unit",
        Read(library="ddp", key="bucket_cap_mb", means={_NONE: "25 MiB"}), "",
    ),
    _row(
        "initial weights sent from rank 0",
        "yes", "no",
        Read(library="fsdp1", key="sync_module_states", means={"False": "no"}),
        Read(library="ddp", key="init_sync", means={"True": "yes"}), "initial-weights-differ",
    ),
)  # fmt: skip


def defaults() -> str:
    """The table, below the versions that it was read from. Raises UnknownDefault."""
    read = libraries()
    body = [[cell.cell(read) if isinstance(cell, Read) else cell for cell in row] for row in ROWS]
    versions = f"Read from torch {version('torch').partition('+')[0]} and DeepSpeed {version('deepspeed')}."
    return f"{versions}\n\n{table(body, HEADERS)}"


def with_defaults(page: str) -> str:
    """The page with the table between its marks."""
    return between(page, BEGIN, END, defaults())


def main() -> None:
    """Write the table into its page."""
    PAGE.write_text(with_defaults(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
