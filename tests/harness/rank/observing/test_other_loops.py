"""Training loops of other shapes: the script ends as without us, and its record tells of it what it did."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.judge.quantities import between_steps, kinds_at, volume_differences
from harness.record import Record
from tests.observed import run_script

pytestmark = pytest.mark.long(seconds=15)
HEAD = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

def loss_of(module, samples=4):
    x = torch.randn(samples, 8)
    return F.mse_loss(module(x), x.sin().sum(1))

def say(loss):
    print("loss", float(loss), flush=True)

def train(steps, told=True):
    for step in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told and say(loss)
"""
SKIPPED = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if step < 2:
        model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    say(loss)
"""
ALONE = """
dist.init_process_group("gloo")
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + dist.get_rank())
for step in range(24):
    loss = loss_of(model)
    optimizer.zero_grad()
    loss.backward()
    {averaged}
    optimizer.step()
    {logged}
"""
DDP = """
dist.init_process_group("gloo")
model, head = nn.parallel.DistributedDataParallel(model), nn.Linear(1, 1)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=bool("{clips}"))
torch.manual_seed(1 + dist.get_rank())
for step in range(8):{passes}
    {clips}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
SAMPLED = """
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(24, 8)
sampler = DistributedSampler(data)
for epoch in range(3):
    {told}
    for x in DataLoader(data, 4, sampler=sampler):
        F.mse_loss(model(x), x.sin().sum(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
AVERAGED = "[(dist.all_reduce(p.grad), p.grad.div_(2)) for p in model.parameters()]"
LOGGED = "dist.all_reduce(torch.tensor([loss.item(), 1.0], dtype=torch.float64))"
"""In 24 steps more bytes than the model has weights."""
BARE = {"busy-machine", "few-timed-steps", "noisy-timing", "slow-data"}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A script, and what its record has."""

    body: str
    steps: int = 8
    samples: tuple[int | None, ...] = (4,)
    """Of each rank in some steps."""
    found: frozenset[str] = frozenset()
    note: str = ""
    updates: int | None = None
    """That the optimizer counts; None: it counts none, or there are several."""
    ranks: int = 1
    left_out: tuple[str, ...] = ()
    """Parameters that no optimizer was given."""


LOOPS = {
    "an optimizer that evaluates its closure several times": Loop(body="""
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
x = torch.randn(4, 8)
for step in range(8):
    losses = []
    def closure():
        optimizer.zero_grad()
        losses.append(F.mse_loss(model(x), x.sin().sum(1)))
        losses[-1].backward()
        return losses[-1]
    optimizer.step(closure)
    say(losses[0])
"""),
    "an optimizer of each parameter in the backward pass": Loop(body="""
optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(8):
    loss = loss_of(model)
    loss.backward()
    say(loss)
""", note="4 optimizers step"),
    "a scaler that skips updates": Loop(body="""
optimizer = torch.optim.AdamW(model.parameters())
""" + SKIPPED, found=frozenset({"skipped-steps"}), updates=6),
    "a scaler that skips those of an optimizer that counts none": Loop(body="""
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
""" + SKIPPED, found=frozenset({"skipped-steps"})),
    "a thread that trains beside it": Loop(body="""
import threading
gate = threading.Barrier(2)
def beside():
    own = nn.Linear(8, 1000)
    other = torch.optim.AdamW(own.parameters())
    for step in range(8):
        gate.wait()
        loss = own(torch.ones(4, 8)).square().mean()
        loss.backward()
        other.step()
        other.zero_grad()
        say(loss)
        gate.wait()
thread = threading.Thread(target=beside)
thread.start()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    loss = loss_of(model)
    gate.wait()
    gate.wait()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
thread.join()
""", note="several threads train", updates=8),
    "threads that train one after the other": Loop(body="""
import threading
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    thread = threading.Thread(target=train, args=(4,))
    thread.start()
    thread.join()
""", updates=8),
    "threads that take turns": Loop(body="""
from concurrent.futures import ThreadPoolExecutor
optimizer = torch.optim.AdamW(model.parameters())
pools = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
for step in range(8):
    pools[step % 2].submit(train, 1).result()
""", updates=8),
    "an optimizer that is made anew": Loop(body="""
for step in range(8):
    optimizer = torch.optim.AdamW(model.parameters())
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(loss)
""", updates=8),
    "an optimizer of a checkpoint": Loop(body="""
optimizer = torch.optim.AdamW(model.parameters())
for p in model.parameters():
    ones = torch.ones_like(p)
    optimizer.state[p] = {"step": torch.tensor(900.0), "exp_avg": ones.clone(), "exp_avg_sq": ones}
train(8)
""", updates=8),
    "sparse gradients": Loop(body="""
model = nn.EmbeddingBag(50, 4, sparse=True)
optimizer = torch.optim.SparseAdam(list(model.parameters()))
for step in range(8):
    loss = model(torch.randint(0, 50, (4, 6))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(loss)
""", updates=8),
    "complex weights": Loop(body="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))
    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
train(8)
"""),
    "a scripted module": Loop(body="""
model = torch.jit.script(model)
optimizer = torch.optim.AdamW(model.parameters())
train(8)
""", samples=(None,), updates=8, note="forward passes of RecursiveScriptModule are not seen"),
    "samples in bfloat16": Loop(body="""
model = model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
loss_of = lambda module: module(torch.randn(4, 8).bfloat16()).float().square().mean()
train(8)
""", updates=8),
    "two backward passes of one forward pass": Loop(body="""
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    out = model(torch.randn(4, 8))
    first, second = out.square().mean(), out.abs().mean()
    optimizer.zero_grad()
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
    say(first + second)
""", updates=8),
    "two models that take turns": Loop(body="""
other = nn.Linear(4, 8)
optimizers = [torch.optim.Adam(one.parameters()) for one in (model, other)]
for step in range(8):
    made = other(torch.randn(4, 4))
    loss = model((made.detach(), made)[step % 2]).square().mean()
    optimizers[step % 2].zero_grad()
    loss.backward()
    optimizers[step % 2].step()
    say(loss)
""", note="several models train"),
    "parameters that no optimizer has": Loop(body="""
optimizer = torch.optim.AdamW(model[2].parameters())
train(8)
""", updates=8, left_out=("0.bias", "0.weight"), note="no optimizer has 0.bias and 1 more"),
    "groups without a number as rate": Loop(body="""
class Signs(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": "auto", "momentum": float("nan")})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= 1e-3 * p.grad.sign()
optimizer = Signs(model.parameters())
train(8)
"""),
    "a process that forks": Loop(body="""
optimizer = torch.optim.AdamW(model.parameters())
train(4)
if (child := os.fork()) == 0:
    train(3, told=False)
    os._exit(0)
os.waitpid(child, 0)
train(4)
""", updates=8),
    "passes, clipping and updates that raise": Loop(body="""
class Choosy(torch.optim.SGD):
    def step(self, closure=None):
        if raised == "update":
            raise RuntimeError
        return super().step(closure)
optimizer = Choosy(model.parameters(), lr=1e-3)
def refuse(_):
    raise RuntimeError
for step in range(12):
    raised = {1: "forward", 3: "backward", 5: "clipping", 7: "update"}.get(step)
    optimizer.zero_grad()
    try:
        if raised == "forward":
            model(torch.randn(6, 9))
        loss = loss_of(model, 6 if raised else 4)
        if raised == "backward":
            loss.register_hook(refuse)
        loss.backward()
        if raised == "clipping":
            model[0].weight.grad[0, 0] = float("nan")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
    except RuntimeError:
        continue
    say(loss)
""", note="gradients of 2 micro-steps were zeroed without an update"),
    "a first try that runs out of memory": Loop(body="""
class Small(nn.Linear):
    def forward(self, x):
        if len(x) > 4:
            raise RuntimeError("out of memory")
        return super().forward(x)
def train(samples):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Small(16, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        loss = loss_of(model, samples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss)
try:
    train(8)
except RuntimeError:
    print("again with 4")
train(4)
""", updates=8),
    "updates without backward()": Loop(body="""
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    gradients = torch.autograd.grad(loss_of(model), list(model.parameters()))
    for parameter, parameter.grad in zip(model.parameters(), gradients):
        pass
    optimizer.step()
""", steps=0, found=frozenset({"nothing-timed"}), note="8 updates followed no call of backward()"),
    "a model that stays in evaluation mode": Loop(body="""
model.insert(1, nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters())
train(3)
model.eval()
train(5)
""", samples=(4, None), updates=8, found=frozenset({"mode-differs"}),
        note="step 3 trains Sequential in evaluation mode"),
    "gradients that are dropped before the first update": Loop(body="""
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    loss_of(model).backward()
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(loss)
""", updates=8, note="gradients of 8 micro-steps were zeroed without an update"),
    "a loss that FSDP's scaler multiplies": Loop(body="""
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
dist.init_process_group("gloo")
optimizer = torch.optim.AdamW(model.parameters())
scaler = ShardedGradScaler(device="cpu", init_scale=2.0**8)
for step in range(8):
    loss = loss_of(model)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    say(loss)
""", updates=8),
    "copies that an optimizer updates in place of the parameters": Loop(body="""
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1), nn.Flatten(0))
own = [*model[0].parameters(), *model[2].parameters()]
masters = [p.detach().clone().requires_grad_() for p in own]
optimizer = torch.optim.AdamW([*masters, *model[1].parameters()])
for step in range(8):
    loss = loss_of(model)
    loss.backward()
    for p, master in zip(own, masters):
        master.grad = p.grad.clone()
    optimizer.step()
    for p, master in zip(own, masters):
        p.data.copy_(master.data)
    model.zero_grad()
    say(loss)
""", updates=8),
    "a parameter of no module": Loop(body="""
scale = nn.Parameter(torch.ones(()))
optimizer = torch.optim.AdamW([*model[2].parameters(), scale])
train(8)
""", updates=8, left_out=("0.bias", "0.weight"), note="no optimizer has 0.bias and 1 more"),
    "ranks that make further steps": Loop(body="""
from torch.distributed.algorithms.join import Join
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1)))
loss_of = lambda module: module(torch.randn(4, 8)).square().mean()
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + dist.get_rank())
with Join([model]):
    for step in range(8 + 3 * dist.get_rank()):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""", ranks=2, updates=8, note="ranks made 8 to 11 steps; the first 8 are recorded"),
    "ranks that average gradients by hand": Loop(
        body=ALONE.format(averaged=AVERAGED, logged=""),
        ranks=2, steps=24, updates=24, note="between steps, seen after step",
    ),
    "two backward passes of one forward pass under DDP": Loop(
        body=DDP.format(passes="""
    out = model(torch.randn(4, 8))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()
""", clips=""), ranks=2, updates=8, found=frozenset({"passes-not-reduced", "replicas-differ"})),
    "a head outside of what DDP wraps": Loop(
        body=DDP.format(passes="""
    head(model(torch.randn(4, 8))[:, None]).square().mean().backward()
""", clips=""), ranks=2, updates=8, found=frozenset({"trained-outside"}), note="several models train"),
    "a teacher whose parameters could train": Loop(
        body=DDP.replace("scaler =", "teacher = nn.Linear(8, 1)\nscaler =").format(passes="""
    x = torch.randn(4, 8)
    with torch.no_grad():
        taught = teacher(x)[:, 0]
    (model(x) - taught).square().mean().backward()
""", clips=""), ranks=2, updates=8),
    "a head whose gradients are averaged by hand": Loop(
        body=DDP.format(passes="""
    head(model(torch.randn(4, 8))[:, None]).square().mean().backward()
    [(dist.all_reduce(p.grad), p.grad.div_(2)) for p in head.parameters()]
""", clips=""), ranks=2, updates=8, note="several models train"),
    "gradients that are clipped while they are scaled": Loop(
        body=DDP.format(passes="""
    scaler.scale(model(torch.randn(4, 8)).sub(9).square().mean()).backward()
""", clips="nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        ranks=2, updates=8, found=frozenset({"clipped-otherwise"})),
    "gradients that are clipped by value while they are scaled": Loop(
        body=DDP.format(passes="""
    scaler.scale(model(torch.randn(4, 8)).sub(9).square().mean()).backward()
""", clips="nn.utils.clip_grad_value_(model.parameters(), 1.0)"),
        ranks=2, updates=8, found=frozenset({"clipped-otherwise"})),
    "gradients that are clipped as they should be": Loop(
        body=DDP.format(passes="""
    scaler.scale(model(torch.randn(4, 8)).sub(9).square().mean()).backward()
    scaler.unscale_(optimizer)
""", clips="nn.utils.clip_grad_norm_(model.parameters(), 1.0)"), ranks=2, updates=8),
    "a sampler that is not told its epoch": Loop(
        body=SAMPLED.format(told=""), ranks=2, steps=9, updates=9, found=frozenset({"epochs-alike"})),
    "samplers whose ranks seed them otherwise": Loop(
        body=SAMPLED.format(told="sampler.set_epoch(epoch); sampler.seed = dist.get_rank()"),
        ranks=2, steps=9, updates=9, found=frozenset({"samples-missing"})),
    "a sampler that is told its epoch": Loop(
        body=SAMPLED.format(told="sampler.set_epoch(epoch)"), ranks=2, steps=9, updates=9),
    "FSDP that reduces in another dtype than it computes in": Loop(body="""
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
dist.init_process_group("gloo")
fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + dist.get_rank())
loss_of = lambda module: module(torch.randn(4, 8)).float().square().mean()
train(8)
""", ranks=2, updates=8),
    "numbers that ranks gather for a log": Loop(
        body=ALONE.format(averaged="", logged=LOGGED),
        ranks=2, steps=24, updates=24, found=frozenset({"ranks-alone"}), note="nothing wraps the model",
    ),
    "weights averaged in one piece beside many logged numbers": Loop(
        body=ALONE.format(averaged="", logged=LOGGED + """
    for _ in range(30):
        dist.all_reduce(torch.tensor([loss.item()]))
    if step % 4 == 3:
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        dist.all_reduce(weights)
        torch.nn.utils.vector_to_parameters(weights / 2, model.parameters())
"""),
        ranks=2, steps=24, updates=24, note="between steps, seen after step",
    ),
}  # fmt: skip


def observed(folder: Path, body: str, ranks: int = 1) -> tuple[Record, list[float]]:
    (folder / "train.py").write_text(HEAD + body)
    seen = run_script(folder, folder / "train.py", ranks=ranks)
    assert seen.codes == [0] * ranks, seen.printed
    assert "harness observe" not in seen.printed[0]
    assert seen.record is not None
    return seen.record, [float(line.split()[1]) for line in seen.lines("loss ")]


def found(record: Record) -> set[str]:
    return {finding.id for finding in Comparison([record]).findings} - BARE


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_recorded_as_it_ran(tmp_path: Path, name: str) -> None:
    loop = LOOPS[name]
    record, losses = observed(tmp_path, loop.body, loop.ranks)
    assert record.status == "ok"
    assert len(record.steps) == loop.steps
    if loop.ranks == 1:
        assert [step.loss for step in record.steps] == pytest.approx(losses)
    assert {step.samples for step in record.steps} <= {of and loop.ranks * of for of in loop.samples}
    assert record.world.accumulation_steps == 1
    if record.observed is not None:
        assert record.observed.optimizer_steps == loop.updates
        assert record.observed.parameters_left_out == [*loop.left_out]
    assert loop.note in " ".join(record.observation.notes)
    assert bool(loop.note) == bool(record.observation.notes)
    assert found(record) == loop.found


LOCAL = """
from contextlib import nullcontext
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import *
dist.init_process_group("gloo")
{given}
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + dist.get_rank())
for step in range(10):
    with model.no_sync() if {within} else nullcontext():
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    if step == {last}:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= 2
"""
WRAPPED = "model = nn.parallel.DistributedDataParallel(model)\n"
HOOKED = """
state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
model.register_comm_hook(state, post_localSGD_hook)
"""


@pytest.mark.parametrize(
    ("given", "within", "at", "note"),
    [
        pytest.param("", False, 7, "between steps, seen after step 7", marks=pytest.mark.exhaustive),
        (WRAPPED, True, 10, "between steps, seen after step 10"),
        (WRAPPED + HOOKED, False, None, "by post_localSGD_hook: bytes and memory are not judged"),
    ],
)
def test_ranks_that_synchronise_now_and_then_are_not_judged_and_not_alone(
    tmp_path: Path, given: str, within: bool, at: int | None, note: str
) -> None:
    """They do so after the steps whose collectives are counted."""
    record, _ = observed(tmp_path, LOCAL.format(given=given, within=within, last=(at or 7) - 1), ranks=2)
    assert record.observation.synchronised_at == at
    assert [text.endswith(note) for text in record.observation.notes] == [True]
    assert record.backend.claim is None
    assert found(record) == set()


PARTS = """
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(8):
    optimizer.zero_grad()
    (scaler.scale(loss_of(model)) + scaler.scale(loss_of(model).sqrt())).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    scaler.step(optimizer)
    scaler.update()
    say(norm)
"""


def test_of_a_sum_of_scaled_losses_no_part_is_told_and_of_clipping_by_parts_the_norm(tmp_path: Path) -> None:
    record, norms = observed(tmp_path, PARTS)
    assert [step.loss for step in record.steps] == [None] * 8
    assert [step.gradient_norm for step in record.steps] == pytest.approx(norms)
    assert record.backend.effective.gradient_clipping == 0.5


def test_another_rate_makes_another_job(tmp_path: Path) -> None:
    jobs = []
    for number, rate in enumerate((1e-3, 1e-3, 2e-3)):
        (folder := tmp_path / str(number)).mkdir()
        body = f"optimizer = torch.optim.AdamW(model.parameters(), lr={rate})\ntrain(4)  # {number}"
        jobs.append(observed(folder, body)[0].job_id)
    assert jobs[0] == jobs[1] != jobs[2]


def test_a_script_without_a_seed_is_told_apart_from_another_one(tmp_path: Path) -> None:
    body = "optimizer = torch.optim.AdamW(model.parameters())\ntorch.seed()\n"
    records = []
    for _ in range(2):
        records.append(
            observed(tmp_path, body + "[nn.init.normal_(p) for p in model.parameters()]\ntrain(4)")[0]
        )
        (tmp_path / "run").rename(tmp_path / f"run-{len(records)}")

    def told() -> bool:
        (found,) = (one for one in Comparison(records).findings if one.id == "several-jobs")
        return "files are the same, the seed is not, or none is set" in found.message

    assert told()
    assert records[1].observation is not None
    records[1].observation.files["train.py"] = "edited"
    assert not told()


TEACHER = """
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
teacher = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)).requires_grad_(False)
fully_shard(teacher)
fully_shard(model)
teacher.set_reshard_after_forward(True)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + dist.get_rank())
for x in DataLoader(torch.randn(40, 8), 4):
    {first}
    given = model(x)
    {second}
    F.mse_loss(given, due).backward()
    optimizer.step()
    optimizer.zero_grad()
    answers = torch.zeros(1000)
    dist.all_gather([torch.zeros(1000) for _ in range(2)], answers)
"""


@pytest.mark.parametrize("place", ["first", pytest.param("second", marks=pytest.mark.exhaustive)])
def test_what_a_teacher_and_a_metric_send_and_hold_is_not_the_strategys(tmp_path: Path, place: str) -> None:
    """Whether the teacher computes before or after the model."""
    parts = {"first": "", "second": ""} | {place: "due = teacher(x)"}
    record, _ = observed(tmp_path, TEACHER.format(**parts), ranks=2)
    gathered, held = (
        4 * (8 * 64 + 64 + 2 * (64 + 1)),
        4 * (4 * 64 + 32 + 64 + 1),
    )  # rows are padded to 2 ranks
    teacher, script = ("Sequential, which does not train", "all_gather"), ("__main__", "all_gather")
    assert between_steps(record) == {teacher: gathered, script: 8000}
    assert kinds_at(record, "after_backward")["other_models"] == held
    assert found(record) == set()
    figures = Comparison([record]).rows[0].figures
    assert figures["sent_bytes_per_step"] == figures["expected_sent_bytes_per_step"] - 8  # it has no norm


ACCUMULATED = """
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch={each}, sync_with_dataloader=False)
accelerator = Accelerator(gradient_accumulation_plugin=plugin)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for micro_step in range(32):
    with accelerator.accumulate(model):
        loss = loss_of(model)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.exhaustive  # its own way through Accelerate: tests/traps/test_clean.py
@pytest.mark.parametrize("each", [True, False])
def test_reductions_that_accelerate_was_asked_for_are_expected(tmp_path: Path, each: bool) -> None:
    record, _ = observed(tmp_path, ACCUMULATED.format(each=each), ranks=2)
    assert record.world.accumulation_steps == 4
    assert record.backend.options == ({"sync_each_batch": True} if each else {})
    synchronised = "every micro-step" if each else "last micro-step"
    assert record.backend.effective.gradient_synchronisation == synchronised
    assert "communication-differs" not in found(record)


ADAPTED = """
import deepspeed
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
deepspeed.init_distributed("gloo")
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
base = LlamaForCausalLM(LlamaConfig(**sizes))
{inputs}
model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config={{
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {{"stage": 3}},
    "optimizer": {{"type": "AdamW", "params": {{"torch_adam": True}}}}}})
for step in range(8):
    ids = torch.randint(64, (2, 16))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
"""


INPUTS = pytest.param("base.enable_input_require_grads()", marks=pytest.mark.costly)


@pytest.mark.parametrize("inputs", ["", INPUTS])
def test_zero3_gathers_nothing_for_modules_without_a_gradient(tmp_path: Path, inputs: str) -> None:
    record, _ = observed(tmp_path, ADAPTED.format(inputs=inputs), 2)
    assert record.layout is not None
    embedding = "base_model.model.model.embed_tokens"
    assert (embedding in (record.layout.without_gradient or ())) == (not inputs)
    assert volume_differences(record) == []
