"""Scripts with groups, other optimizers and other faults: what the record has of them, and what is found."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.judge.comparison import Comparison
from harness.record import Record
from tests.observed import run_script

HEAD = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden):
        return hidden + torch.relu(self.linear(hidden))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.attention_dropout = 0.25

    def forward(self, x):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden).squeeze(-1)
"""
JOIN = """
dist.init_process_group("gloo")
torch.manual_seed(0)
"""
TRAIN = """
torch.manual_seed(1 + dist.get_rank())
x = torch.randn(4, 8)
for step in range(7):
    loss = model(x).sub(x.sin().sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
GROUPS = (
    JOIN
    + """
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cuda.matmul.fp32_precision = "tf32"  # by both interfaces
torch.backends.fp32_precision = "ieee"
model = DDP(Model())
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if n.startswith("first")], "lr": 1e-3},
    {"params": [p for n, p in named if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
    {"params": [p for n, p in named if p.ndim < 2], "lr": 1e-3},
]
optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda i: 1.0, lambda i: 0.5**i, lambda i: 1.0])
optimizer.register_step_post_hook(lambda *_: schedule.step())
"""
    + TRAIN
)
FLAT = (
    JOIN
    + """
model = Model()
early = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = FSDP(
    model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=False, device_id=torch.device("cpu")
)
optimizer = early if "--early" in sys.argv else torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
    + TRAIN
)
ALONE = """
class Signs(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"eps": (1e-30, 1e-3)})

    def step(self):
        for p in self.param_groups[0]["params"]:
            moments = self.state[p].setdefault("moments", [torch.zeros_like(p, dtype=torch.bfloat16)])
            moments[0].lerp_(p.grad.to(torch.bfloat16), 0.1)
            p.data.sub_(moments[0].sign(), alpha=1e-3)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids, labels):
        return {"loss": nn.functional.cross_entropy(self.head(self.table(input_ids)).mT, labels)}

torch.manual_seed(0)
model = Words()
optimizer = Signs(model.parameters())
for step in range(7):
    ids = torch.randint(0, 16, (4, 8))
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids)["loss"].backward()
    optimizer.step()
"""
ACCELERATED = """
import os
os.environ["ACCELERATE_USE_FSDP"] = "true"
from accelerate import Accelerator

torch.manual_seed(0)
model = Model()
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
torch.manual_seed(1 + dist.get_rank())
for step in range(7):
    x = torch.randn(4, 8)
    accelerator.backward(model(x).sub(x.sin().sum(1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
ABOUT_MACHINE = {"busy-machine", "few-timed-steps", "noisy-timing", "slow-data"}
ELEMENTS = 8 * 32 + 32 + 2 * (32 * 32 + 32) + 32 + 1


def observed(folder: Path, body: str, *arguments: str) -> Record:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(HEAD + body)
    seen = run_script(folder, folder / "train.py", *arguments)
    assert seen.codes == [0, 0], seen.printed
    assert seen.record.status == "ok"
    return seen.record


def found(record: Record) -> dict[str, str]:
    """Findings that are not of the machine, with their texts."""
    findings = Comparison([record]).findings
    return {finding.id: finding.text for finding in findings if finding.id not in ABOUT_MACHINE}


def optimizer_bytes(record: Record) -> set[int]:
    """After the updates of the last probed step, by rank."""
    last = [[p for p in rank.memory if p.moment == "after_step"][-1] for rank in record.ranks]
    return {(part.kinds or {}).get("optimizer", 0) for part in last}


def test_each_group_has_its_rates_decay_and_tensors_and_an_empty_one_is_found(tmp_path: Path) -> None:
    record = observed(tmp_path, GROUPS)
    groups = record.observed.optimizer_groups
    assert [(g["tensors"], g["weight_decay"]) for g in groups] == [(0, 0.0), (4, 0.1), (4, 0.0)]
    assert groups[1]["parameters"] == [
        "blocks.0.linear.weight", "blocks.1.linear.weight", "first.weight", "last.weight",
    ]  # fmt: skip
    assert [g["dtypes"] for g in groups] == [[], ["float32"], ["float32"]]
    halved = [1e-2 * 0.5**step for step in range(7)]
    empty, decaying, others = record.observation.learning_rates
    assert (empty, others) == ([1e-3] * 7, [1e-3] * 7)
    assert decaying == pytest.approx(halved)
    assert [step.learning_rate for step in record.steps] == pytest.approx(halved)
    assert (record.observed.dropout, record.observed.tf32) == (0.25, True)
    assert found(record).keys() == {"empty-group"}
    path = tmp_path / "record" / "record.json"
    path.parent.mkdir()
    path.write_text(record.model_dump_json())
    report = str(tmp_path / "report.md")
    for command in (
        ["list", "--runs", str(path.parent)],
        ["show", str(path.parent)],
        ["report", str(path), "-o", report],
        ["verify", report],
    ):
        done = CliRunner().invoke(harness, command)
        assert done.exit_code == 0, (command, done.output)


def test_flat_parameters_have_their_closed_form_and_no_finding(tmp_path: Path) -> None:
    record = observed(tmp_path, FLAT)
    # Root and blocks each have one step count; the root's odd number of elements is padded.
    assert optimizer_bytes(record) == {2 * 4 * (ELEMENTS + 1) // 2 + 3 * 4}
    assert record.layout.blocks == ("blocks.0", "blocks.1")
    assert sum(p.name.endswith("weight") for p in record.layout.parameters) == 4
    assert found(record).keys() == set()
    kept = observed(tmp_path / "kept", FLAT.replace("use_orig_params=False", "use_orig_params=True"))
    assert record.initial_weights is not None
    assert record.initial_weights.digest == kept.initial_weights.digest


def test_an_optimizer_made_before_wrapping_is_found(tmp_path: Path) -> None:
    record = observed(tmp_path, FLAT, "--early")
    assert record.observed.updated_tensors == 0
    assert "no tensor of its 8 had a gradient" in found(record)["nothing-updated"]


def test_what_accelerate_runs_in_place_of_fsdp_is_found(tmp_path: Path) -> None:
    findings = found(observed(tmp_path, ACCELERATED))
    assert findings.keys() == {"strategy-differs"}
    text = "runs DistributedDataParallel, although FSDP through Accelerate was requested"
    assert findings["strategy-differs"] == text


def test_ranks_alone_with_an_optimizer_of_their_own_are_found(tmp_path: Path) -> None:
    record = observed(tmp_path, ALONE)
    assert {step.tokens for step in record.steps} == {2 * 4 * 8}
    assert record.observed.optimizer_groups[0]["eps"] == [1e-30, 1e-3]
    assert record.job.optimizer.epsilon is None
    assert record.observation.learning_rates == [[None] * 7]
    assert record.observed.optimizer_state_dtypes == ["bfloat16"]
    assert optimizer_bytes(record) == {2 * (16 * 8 + 8 * 16 + 16)}
    findings = found(record)
    assert findings.keys() == {"ranks-alone"}
    assert findings["ranks-alone"].endswith("a model of its own, all on the same samples")
