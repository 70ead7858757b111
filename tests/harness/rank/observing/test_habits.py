"""Mistakes around updates, which no figure of a step shows: each is named, and its sound twin is not."""

import math
from pathlib import Path
from textwrap import indent

import pytest
import torch
from torch.nn import functional

from harness.rank.observing.habits import Habits, divisor_of
from tests.harness.rank.observing.test_other_loops import found, observed

pytestmark = pytest.mark.long(seconds=25)
LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.{schedule}
for step in range(8):
    for micro in range(2):
        (loss_of(model){divided}).backward(){each}
    optimizer.step()
    {after}
"""
LENGTH = "LambdaLR(optimizer, (lambda updates: lambda n: max(0, 1 - n / updates))({}))"
OF_SETTINGS = """LambdaLR(optimizer, (lambda given: lambda n: max(0, 1 - n / given.steps))(
    __import__("types").SimpleNamespace(steps=16)))"""
OF_TABLE = "LambdaLR(optimizer, (lambda given: lambda n: max(0, 1 - n / given['steps']))({'steps': 16}))"
LAMBDA, ZERO = "LambdaLR(optimizer, lambda n: 1 / (1 + n))", "optimizer.zero_grad()"


def loop(
    *, schedule: str = LAMBDA, divided: str = " / 2", each: str = "", after: str = f"{ZERO}; scheduler.step()"
) -> str:
    return LOOP.format(schedule=schedule, divided=divided, each=f"; {each}" if each else "", after=after)


EVALUATED = """
model.append(nn.Identity()).append(nn.Dropout({p}))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    {often}
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    if step % 4 == 3:
        {before}
        with torch.no_grad():
            loss_of(model)
        {again}
"""
NO_GRADIENT = "        with torch.no_grad():\n            loss_of(model)\n"
AGAIN = "with torch.no_grad(): model(once); model(once)"
WINDOWS = """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    window = 2 if step % 3 == 2 else 4
    for micro in range(window):
        (loss_of(model) / {by}).backward()
    {scaled}
    optimizer.step()
    optimizer.zero_grad()
"""
TURNS = """
other = nn.Linear(1, 1)
first, optimizer = torch.optim.AdamW(other.parameters()), torch.optim.AdamW(model.parameters())
for step in range(8):
    first.zero_grad()
    other(model(torch.randn(4, 8))[:, None]).square().mean().backward()
    first.step()
    optimizer.zero_grad()
    other(model(torch.randn(4, 8))[:, None]).square().mean().backward()
    optimizer.step()
"""
WRAPPED = """
dist.init_process_group("gloo")
torch.manual_seed({seed})
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout({p}), nn.Linear(16, 1), nn.Flatten(0))
{wrapped}
{changed}
optimizer = torch.optim.AdamW(model.parameters())
order = torch.Generator().manual_seed(dist.get_rank())
for step in range(8):
    (model(torch.randn(4, 8, generator=order)).square().mean(){times}).backward()
    {reduced}
    optimizer.step()
    optimizer.zero_grad()
"""
IN_DDP = "model = nn.parallel.DistributedDataParallel(model)"
UNUSED = IN_DDP.replace("model)", "model, find_unused_parameters=True)")
IN_FSDP = "from torch.distributed.fsdp import fully_shard\nfully_shard(model)"


UNDIVIDED = "model(torch.randn(4, 8, generator=order)).square().mean().backward()"
AGAINST = " + model(torch.ones(4, 8)).square().mean()"
OTHER = f"other = nn.Linear(8, 1)\n{IN_DDP.replace('model', 'other')}"
SECOND = f"{OTHER}\nsecond = torch.optim.SGD(other.parameters())"
SCALE = "scale = nn.Parameter(torch.ones(()))\nsecond = torch.optim.SGD([scale])"
UPDATED = "second.step(); second.zero_grad()"
ONE_PASS = "(model(torch.randn(4, 8, generator=order)).square().mean()).backward()"
TWO_PASSES = (
    "out = model(torch.randn(4, 8, generator=order)); "
    "out.mean().backward(retain_graph=True); out.square().mean().backward()"
)
MASTERS = "masters = [p.detach().double() for p in model.parameters()]"
TO_MASTERS = (
    "[setattr(m, 'grad', p.grad.double()) for m, p in zip(masters, model.parameters())]; "
    "optimizer.step(); [p.data.copy_(m) for m, p in zip(masters, model.parameters())]; "
    "model.zero_grad(); continue"
)
IN_TURN = (
    "optimizer.step(); optimizer.zero_grad(); other(torch.ones(4, 8)).square().mean().backward(); "
    "second.step(); second.zero_grad(); continue"
)


FROZEN_IN_TURN = IN_TURN.replace("other(", "other.requires_grad_(True); other(").replace(
    "continue", "other.requires_grad_(False); continue"
)
JOINED = """
from torch.distributed.algorithms.join import Join
def joined():
    with Join([model]):
        yield from range(8 + 2 * dist.get_rank())
"""


def wrapped(
    *, seed: str = "dist.get_rank()", p: float = 0.0, by: str = IN_DDP, changed: str = "", reduced: str = "",
    times: str = "",
) -> str:  # fmt: skip
    return WRAPPED.format(seed=seed, p=p, wrapped=by, changed=changed, reduced=reduced or "pass", times=times)


SHARDS = "[*torch.utils.data.DistributedSampler(range(8))]"
EVALUATES = "optimizer.step(); optimizer.zero_grad(); torch.no_grad()(model)(torch.randn(4, 8)); continue"
HALVES = " * (1 - dist.get_rank() / 2)"
CLIPS = "nn.utils.clip_grad_norm_(model.parameters(), {})"
LANGUAGE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Own(LlamaForCausalLM):
    def forward(self, input_ids, labels):
        out = super().forward(input_ids=input_ids)
        out.loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
model = {kind}(LlamaConfig(**sizes))
"""
AHEAD = (
    LANGUAGE
    + """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    tokens = torch.randint(0, 64, (2, 17))
    out = model(input_ids=tokens[:, :-1], labels={labels})
    {loss}.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
NEXT, BY_LOGITS = "tokens[:, 1:]", "F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())"
TRAINED = (
    LANGUAGE
    + """
from transformers import Trainer, TrainingArguments
class Train(Trainer):
    def compute_loss(self, model, inputs, num_items_in_batch=None, **named):
        {loss}
data = [{{"input_ids": ids, "labels": ids}} for ids in torch.randint(0, 64, (64, 16))]
arguments = TrainingArguments(
    output_dir="out", max_steps=8, per_device_train_batch_size=2, use_cpu=True, report_to=[],
    save_strategy="no", disable_tqdm=True, average_tokens_across_devices={average},
)
Train(model, arguments, train_dataset=data).train()
"""
)
SUMMED = """labels, ranks = inputs.pop("labels"), self.args.world_size
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
        return loss"""

INHERITED = "return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)"


def ahead(*, kind: str = "LlamaForCausalLM", labels: str = NEXT, loss: str = "out.loss") -> str:
    return AHEAD.format(kind=kind, labels=labels, loss=loss)


def trained(loss: str, *, average: bool = True) -> str:
    return TRAINED.format(kind="LlamaForCausalLM", loss=loss, average=average)


SEEDED = """
from torch.utils.data import DataLoader
data = torch.randn(20, 8)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(4):
    {seed}
    for place, x in enumerate(DataLoader(data, 4, shuffle=True)):
        (F.mse_loss(model(x), x.sin().sum(1)) / {by}).backward()
        if {when}:
            optimizer.step()
            optimizer.zero_grad()
"""
DRAWN = """
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1), nn.Flatten(0))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    {before}
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCALED = """
optimizer = torch.optim.AdamW(model.parameters(), fused={fused})
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(8):
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    {then}
"""
STEPS = "; scaler.step(optimizer); scaler.update()"
BY_NORM = (
    "norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt(); "
    "[p.grad.mul_(min(1.0, 0.05 / float(norm))) for p in model.parameters()]"
)
VALUES = "nn.utils.clip_grad_value_(model.parameters(), 0.01)" + STEPS
GATHERED = """
from torch.distributed.nn.functional import all_gather
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
for step in range(8):
    every = torch.cat({gather}(model(torch.randn(4, 8))))
    F.cross_entropy(every @ every.T, torch.arange(8)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OWN_GATHER = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        dist.all_gather(parts := [torch.empty_like(x) for _ in range(2)], x)
        return tuple(parts)
    @staticmethod
    def backward(context, *gradients):
        dist.all_reduce(whole := torch.stack(gradients))
        return whole[dist.get_rank()]
"""
IN_A_ROW = """
dist.init_process_group("gloo")
for rate in (1e-3, 1e-2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    torch.manual_seed(dist.get_rank())
    train(8, False)
"""
DRAWS = """
from torch.utils.data import DataLoader, Subset
dist.init_process_group("gloo")
data, rank = torch.randn(24, 8), dist.get_rank()
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    for x in DataLoader({data}, 4, shuffle=True):
        F.mse_loss(model(x), x.sin().sum(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
EACH_CLIPPED = "micro and [nn.utils.clip_grad_norm_(p, 0.01) for p in model.parameters()]"
COPY = "import copy\nother = copy.deepcopy(model)\n"
PREPARED = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = {schedule}
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""
WARMED = "__import__('transformers').get_constant_schedule_with_warmup(optimizer, 8)"
ONCE = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {})"
RAMP = "LambdaLR(optimizer, lambda n: min(1, (n + 1) / 8))"
DECAY = "__import__('transformers').get_linear_schedule_with_warmup(optimizer, 0, 8)"
ONE_CYCLE = "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps={})"
TWICE = "optimizer = torch.optim.AdamW(model.parameters())"


PROBED = "optimizer.param_groups[0].update(lr=scheduler.get_last_lr()[0])"
PROBE = "CosineAnnealingLR(torch.optim.SGD({}), 20)"
BUFFERS = (
    "ps = [*model.parameters()]; "
    "total = [p.grad + (t if micro else 0) for p, t in zip(ps, total if micro else ps)]; "
    "{} if micro else optimizer.zero_grad()"
)
PARTS = "micro and [nn.utils.clip_grad_norm_(model[n].parameters(), 0.01) for n in (0, 2)]"
HELD_OUT = (
    "with torch.no_grad(): "
    "[model(x) for x in DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data, 1, 0))]"
)


def seeded(*, seed: str = "pass", by: int = 1, when: str = "True") -> str:
    return SEEDED.format(seed=seed, by=by, when=when)


def remade(place: str) -> str:
    """A loop whose model or optimizer is made anew before its first step."""
    return loop().replace("for step", f"{place}\nfor step")


HEAD_OF = "(model.module if hasattr(model, 'module') else model)[2] = nn.Linear(16, 1)"
BY_HAND = "[(dist.all_reduce(p.grad), p.grad.div_(2)) for p in model[2].parameters()]"
SUMMED_BY_HAND = "[dist.all_reduce(p.grad) for p in model.parameters()]"
AVERAGED = "[(dist.all_reduce(p.grad), p.grad.div_(2)) for p in model{}.parameters()]"
NORM = "norm = sum(p.grad{}.square().sum() for p in model.parameters()).sqrt()"
AND_BACK = """[p.data.add_(p.grad).sub_(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=order)).square().mean().backward()"""
FULL, SHARD = ".full_tensor()", "._local_tensor"
CUT = f"; [p.grad{SHARD}.mul_(0.01 / norm) for p in model.parameters()]"
LOST = "optimizer.state and step % 3 == 0 and [s['exp_avg'].zero_() for s in optimizer.state.values()]"
LOADED = "step == 4 and optimizer.load_state_dict(optimizer.state_dict())"
NARROW = "model.bfloat16(); loss_of = lambda m: m(torch.randn(4, 8).bfloat16()).square().mean()"
SCRIPTS: dict[str, tuple[str, int, set[str]]] = {
    "sound": (loop(), 1, set()),
    "never-zeroed": (loop(after="scheduler.step()"), 1, {"gradients-kept"}),
    "zeroed in place": (loop(after="optimizer.zero_grad(set_to_none=False); scheduler.step()"), 1, set()),
    "zeroed by hand": (loop(after="[setattr(p, 'grad', None) for p in model.parameters()]"), 1, set()),
    "one parameter is never zeroed": (loop(after="model[0].zero_grad()"), 1, {"gradients-kept"}),
    "two optimizers in turns": (TURNS, 1, set()),
    "a schedule per micro-step": (loop(each="scheduler.step()", after=ZERO), 1, {"scheduler-calls"}),
    "a schedule per micro-step, in a function": (
        f"def main():{indent(loop(each='scheduler.step()', after=ZERO), '    ')}\nmain()", 1,
        {"scheduler-calls"}),
    "a schedule counted in micro-steps": (
        loop(schedule="CosineAnnealingLR(optimizer, 16)", each="scheduler.step()", after=ZERO), 1, set()),
    "a schedule whose function counts micro-steps": (
        loop(schedule=LENGTH.format("8 * 2"), each="scheduler.step()", after=ZERO), 1, set()),
    "a schedule whose function counts micro-steps of a configuration": (
        loop(schedule=OF_SETTINGS, each="scheduler.step()", after=ZERO), 1, set()),
    "a schedule whose function counts micro-steps of a table": (
        loop(schedule=OF_TABLE, each="scheduler.step()", after=ZERO), 1, set()),
    "a schedule whose function counts updates, per micro-step": (
        loop(schedule=LENGTH.format("8"), each="scheduler.step()", after=ZERO), 1,
        {"scheduler-calls", "nothing-updated"}),
    "a schedule per process": (
        loop(after=f"{ZERO}; scheduler.step(); scheduler.step()"), 1, {"scheduler-calls"}),
    "a schedule per epoch": (loop(after=f"{ZERO}; step % 4 == 3 and scheduler.step()"), 1, set()),
    "a schedule of schedules": (
        loop(schedule="ChainedScheduler([torch.optim.lr_scheduler.LinearLR(optimizer), "
                      "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])"), 1, set()),
    "a schedule that ends early": (
        loop(schedule="LambdaLR(optimizer, lambda n: max(0, 1 - n / 4))"), 1, {"nothing-updated"}),
    "not divided": (loop(divided=""), 1, {"loss-not-divided"}),
    "divided twice": (loop(divided=" / 2 / 2"), 1, {"loss-not-divided"}),
    "a micro-step that adds nothing": (loop(divided=" / 2 * micro"), 1, {"loss-not-divided"}),
    "a micro-step that adds nothing at first": (loop(divided=" / 2 * max(micro, step > 3)"), 1, set()),
    "a rank that ascends": (wrapped(times=" * (1 - 2 * dist.get_rank())"), 2, {"loss-not-divided"}),
    "a rank that counts half": (wrapped(changed=SHARDS, times=HALVES), 2, {"loss-not-divided"}),
    "a rank that counts half of data of its own": (wrapped(times=HALVES), 2, set()),
    "a rank that counts half at the end": (
        wrapped(changed=SHARDS, times=f"{HALVES} ** (step == 7)"), 2, set()),
    "divided as gradients": (
        loop(divided="", each="micro and [p.grad.div_(2) for p in model.parameters()]"), 1, set()),
    "a sum divided by its samples": (
        loop(divided="").replace("loss_of(model)", "model(torch.randn(2, 8)).square().sum() / 4"), 1, set()),
    "evaluates in training mode": (
        EVALUATED.format(p=0.1, often="", before="", again=""), 1, {"mode-differs"}),
    "evaluates in training mode, where that is no other": (
        EVALUATED.format(p=0.0, often="", before="", again=""), 1, set()),
    "evaluates as it should": (
        EVALUATED.format(p=0.1, often="", before="model.eval()", again="model.train()"), 1, set()),
    "trains as it evaluated": (
        EVALUATED.format(p=0.1, often="", before="model.eval()", again=""), 1, {"mode-differs"}),
    "passes without gradients in each step": (
        EVALUATED.format(p=0.1, often="with torch.no_grad(): loss_of(model)", before="", again=""), 1, set()),
    "samples what dropout draws for one batch": (
        EVALUATED.format(p=0.1, often="once = torch.randn(4, 8)", before="", again=AGAIN), 1, set()),
    "a short window divided as a long one": (WINDOWS.format(by=4, scaled=""), 1, {"loss-not-divided"}),
    "a short window divided by its own": (WINDOWS.format(by="window", scaled=""), 1, set()),
    "trains as what DDP wraps evaluated": (
        wrapped(p=0.1, reduced="step == 3 and model.module.eval()"), 2, {"mode-differs"}),
    "what DDP wraps evaluates between steps": (
        wrapped(p=0.1, reduced="step == 3 and (model.module.eval(), model.module.train())"), 2, set()),
    "a part of what DDP wraps stays in evaluation mode": (
        wrapped(p=0.1, reduced="step == 3 and model.module[1].eval()"), 2, set()),
    "clipped-each": (loop(each=CLIPS.format(0.01)), 1, {"clipped-otherwise"}),
    "clipped before the last micro-step": (
        loop(each=f"micro or {CLIPS.format(0.01)}"), 1, {"clipped-otherwise"}),
    "clipped in the last micro-step": (loop(each=f"micro and {CLIPS.format(0.01)}"), 1, set()),
    "norms of each micro-step": (loop(each=CLIPS.format("float('inf')")), 1, set()),
    "micro-steps that are clipped apart": (
        loop(each=f"{CLIPS.format(0.01)}; kept = [p.grad.clone() for p in model.parameters()]; "
                  "micro or optimizer.zero_grad(set_to_none=False)"), 1, set()),
    "labels that are shifted twice": (ahead(), 1, {"labels-misplaced"}),
    "labels that the model shifts": (ahead(labels="tokens[:, :-1]"), 1, set()),
    "labels that a model of one's own does not shift": (ahead(kind="Own"), 1, set()),
    "labels shifted for a loss of one's own": (ahead(loss=BY_LOGITS), 1, set()),
    "a share of the tokens of all ranks": (trained(SUMMED), 2, {"loss-not-divided"}),
    "a share of the tokens of all ranks, times the ranks": (trained(f"{SUMMED} * ranks"), 2, set()),
    "a share of the tokens of a rank": (trained(SUMMED, average=False), 2, set()),
    "the Trainer's own share": (trained(INHERITED), 2, set()),
    "averaged by hand": (wrapped(seed="0", by="", reduced=AVERAGED.format("")), 2, set()),
    "averaged by hand, begun apart": (wrapped(by="", reduced=AVERAGED.format("")), 2, {"replicas-differ"}),
    "averaged by hand but for a layer": (
        wrapped(seed="0", by="", reduced=AVERAGED.format("[0]")), 2, {"replicas-differ"}),
    "added up by hand": (wrapped(seed="0", by="", reduced=SUMMED_BY_HAND), 2, {"gradient-scale"}),
    "added up by hand, each a share": (
        wrapped(seed="0", by="", reduced=SUMMED_BY_HAND, times=" / 2"), 2, set()),
    "a rank that moves its weights": (
        wrapped(reduced="step == 2 and dist.get_rank() and model.module[0].weight.data.mul_(2)"), 2,
        {"replicas-differ"}),
    "ranks that move their weights, and back": (
        wrapped(reduced=AND_BACK).replace("    (model(", "    with model.no_sync(): (model(", 1), 2, set()),
    "cut by the norm of a shard": (
        wrapped(by=IN_FSDP, reduced=NORM.format(SHARD) + CUT), 2, {"clipped-otherwise"}),
    "cut by the norm of all": (wrapped(by=IN_FSDP, reduced=NORM.format(FULL) + CUT), 2, set()),
    "moments that are zeroed": (loop(each=f"micro and {LOST}"), 1, {"update-altered"}),
    "states that are loaded": (loop(each=f"micro and {LOADED}"), 1, set()),
    "weights of low precision": (f"{NARROW}; nn.init.ones_(model[0].bias){loop()}", 1, {"lost-updates"}),
    "ranks that drop alike": (wrapped(seed="0", p=0.1), 2, {"masks-alike"}),
    "ranks that drop otherwise": (wrapped(p=0.1), 2, set()),
    "ranks seeded alike without dropout": (wrapped(seed="0"), 2, set()),
    "losses that are propagated one by one": (loop(divided="", each="loss_of(model).backward()"), 1, set()),
    "a last micro-step with code of its own": (
        wrapped(reduced=UNDIVIDED).replace("    (model(", "    with model.no_sync(): (model(", 1), 2,
        {"loss-not-divided"}),
    "passes of two batches before one backward pass": (wrapped(by=IN_FSDP, times=AGAINST), 2, set()),
    "two backward passes under FSDP": (wrapped(by=IN_FSDP).replace(ONE_PASS, TWO_PASSES), 2, set()),
    "masters made by hand": (
        wrapped(changed=MASTERS, reduced=TO_MASTERS).replace("(model.parameters())", "(masters)"), 2, set()),
    "a second model that trains in turn": (wrapped(changed=SECOND, reduced=IN_TURN), 2, set()),
    "a temperature that no module has": (
        wrapped(by=IN_FSDP, changed=SCALE, times=" * scale", reduced=UPDATED), 2, {"trained-outside"}),
    "a temperature that is averaged by hand": (
        wrapped(by=IN_FSDP, changed=SCALE, times=" * scale",
                reduced=f"dist.all_reduce(scale.grad); scale.grad.div_(2); {UPDATED}"), 2, set()),
    "a head added to what DDP wraps": (
        wrapped(by=UNUSED, changed=HEAD_OF), 2, {"trained-outside", "replicas-differ"}),
    "a head added to what FSDP wraps": (wrapped(by=IN_FSDP, changed=HEAD_OF), 2, {"trained-outside"}),
    "a head replaced after the optimizer was made": (
        remade("model[2] = nn.Linear(16, 1)"), 1, {"nothing-updated"}),
    "a smaller head, before DDP": (
        wrapped(by=f"given = [*model.parameters()]\nmodel[2] = nn.Linear(16, 1, False)\n{IN_DDP}").replace(
            "AdamW(model.parameters())", "AdamW(given)"), 2, {"nothing-updated"}),
    "an optimizer of a head alone, and of one that is not used": (
        "other = nn.Linear(16, 2)" + loop().replace(
            "(model.parameters())", "([*model[2].parameters(), *other.parameters()])"), 1, set()),
    "an optimizer of a head alone": (loop().replace("(model.par", "(model[2].par"), 1, set()),
    "an optimizer made after its scheduler": (remade(TWICE), 1, {"scheduler-calls"}),
    "a prepared schedule counted in updates": (
        PREPARED.format(schedule=ONCE.format(8)), 2, {"scheduler-calls"}),
    "a prepared cycle counted in updates": (
        PREPARED.format(schedule=ONE_CYCLE.format(8)), 2, {"scheduler-calls"}),
    "a prepared schedule counted in its calls": (PREPARED.format(schedule=ONCE.format(16)), 2, set()),
    "a prepared cycle counted in its calls": (PREPARED.format(schedule=ONE_CYCLE.format(16)), 2, set()),
    "a prepared warm-up as long as the training": (PREPARED.format(schedule=WARMED), 2, set()),
    "values cut while they are scaled": (SCALED.format(fused=False, then=VALUES), 1, {"clipped-otherwise"}),
    "values cut as they should be": (
        SCALED.format(fused=False, then=f"scaler.unscale_(optimizer); {VALUES}"), 1, set()),
    "an update by scaled gradients": (
        SCALED.format(fused=False, then="optimizer.step()"), 1, {"clipped-otherwise"}),
    "an update by gradients unscaled by hand": (
        SCALED.format(
            fused=False, then="[p.grad.div_(256) for p in model.parameters()]; optimizer.step()"), 1, set()),
    "an update that unscales": (SCALED.format(fused=True, then=f"pass{STEPS}"), 1, set()),
    "clipped before the backward pass": (
        EVALUATED.format(p=0.0, often="pass", before="", again="").replace(
            "    loss_of(model).backward()", f"    {CLIPS.format(0.01)}; loss_of(model).backward()"), 1,
        {"clipped-otherwise"}),
    "zeroed before each micro-step": (
        loop(each=f"micro or {ZERO}"), 1, {"loss-not-divided"}),
    "ascends before it descends": (loop(divided="", each=f"micro or {ZERO}"), 1, set()),
    "a rest that goes into the next epoch": (
        seeded(by=2, when="place % 2"), 1, {"loss-not-divided"}),
    "epochs seeded alike": (seeded(seed="torch.manual_seed(0)"), 1, {"epochs-alike"}),
    "epochs seeded otherwise": (seeded(seed="torch.manual_seed(epoch)"), 1, set()),
    "steps seeded alike": (DRAWN.format(before="torch.manual_seed(0)"), 1, {"masks-alike"}),
    "steps seeded otherwise": (DRAWN.format(before="torch.manual_seed(step)"), 1, set()),
    "steps seeded alike that drop nothing": (
        DRAWN.format(before="torch.manual_seed(0); model[1].eval()"), 1, set()),
    "what FSDP gathered last of its root": (
        wrapped(by=IN_FSDP) + "with torch.no_grad(): model(torch.randn(4, 8))\n", 2, set()),
    "what FSDP gathered for an evaluation and frees later": (
        wrapped(by=IN_FSDP, reduced=EVALUATES), 2, set()),
    "a rank that decays": (
        wrapped(by=IN_FSDP).replace("parameters())", "parameters(), weight_decay=dist.get_rank())"), 2,
        {"ranks-differ"}),
    "rates that are read from a schedule of nothing": (
        loop(schedule=PROBE.format("[torch.zeros(1)]"), after=f"{ZERO}; scheduler.step(); {PROBED}"), 1,
        set()),
    "rates that are read from a schedule beside": (
        loop(schedule=PROBE.format("model.parameters()"), after=f"{ZERO}; scheduler.step(); {PROBED}"), 1,
        set()),
    "a schedule of what trains later": (
        loop(schedule=PROBE.format("nn.Linear(8, 1).parameters()")), 1, set()),
    "steps that drop by turns": (DRAWN.format(before="model[1].train(step % 2 > 0)"), 1, set()),
    "evaluations that take gradients, the last one too": (
        EVALUATED.format(p=0.3, often="pass", before="model.eval(); loss_of(model).backward()",
                         again="model.train()"), 1, set()),
    "a rank that changes its weights after few steps": (
        wrapped(reduced="step == 5 and dist.get_rank() and model.module[0].weight.data.mul_(1.5)"), 2,
        {"replicas-differ"}),
    "evaluations in one order": (seeded(seed=HELD_OUT).replace("shuffle=True", ""), 1, set()),
    "a norm cut by hand while it is scaled": (
        SCALED.format(fused=False, then=BY_NORM + STEPS), 1, {"clipped-otherwise"}),
    "a norm cut by hand": (
        SCALED.format(fused=False, then=f"scaler.unscale_(optimizer); {BY_NORM}{STEPS}"), 1, set()),
    "gradients halved while they are scaled": (
        SCALED.format(fused=False, then="[p.grad.div_(2) for p in model.parameters()]" + STEPS), 1, set()),
    "evaluates with gradients in training mode": (
        EVALUATED.format(p=0.3, often="", before="loss_of(model); loss_of(model)", again="").replace(
            NO_GRADIENT, ""), 1, {"mode-differs"}),
    "evaluates with gradients": (
        EVALUATED.format(p=0.3, often="", before="model.eval(); loss_of(model)", again="model.train()")
        .replace(NO_GRADIENT, ""), 1, set()),
    "leaves out a batch": (
        EVALUATED.format(p=0.3, often="", before="loss_of(model)", again="").replace(
            NO_GRADIENT, ""), 1, set()),
    "a loss over what ranks gather": (GATHERED.format(gather="all_gather"), 2, set()),
    "a loss over what ranks gather by their own code": (
        OWN_GATHER + GATHERED.format(gather="Gather.apply"), 2, set()),
    "models that train in a row": (IN_A_ROW, 2, set()),
    "one process that normalises over its batch": (
        "model.insert(1, nn.BatchNorm1d(16))\n" + loop().replace("range(2)", "range(1)").replace(" / 2", ""),
        1, set()),
    "samples what dropout draws for a part of a batch": (
        EVALUATED.format(p=0.1, often="", before="", again=AGAIN.replace("once", "x[:4]")).replace(
            NO_GRADIENT, "").replace("for step", "x = torch.randn(8, 8)\nfor step"), 1, set()),
    "ranks that shuffle all data": (DRAWS.format(data="data"), 2, {"samples-repeated"}),
    "ranks that shuffle their parts": (DRAWS.format(data="Subset(data, range(rank, 24, 2))"), 2, set()),
    "a schedule before its update": (
        loop(after=ZERO).replace("    for micro", "    scheduler.step()\n    for micro"), 1,
        {"scheduler-calls"}),
    "a schedule that skips its first rate": (
        loop().replace("for step", "scheduler.step()\nfor step"), 1, set()),
    "an optimizer of a copy's body": (
        COPY + loop().replace("(model.parameters())", "([*other[0].parameters(), *model[2].parameters()])"),
        1, {"nothing-updated"}),
    "parts that are clipped apart, one of them frozen": (
        loop(each=PARTS).replace("for step", "model[0].requires_grad_(False)\nfor step"), 1, set()),
    "buffers of one's own": (
        loop(each=BUFFERS.format("[setattr(p, 'grad', t) for p, t in zip(ps, total)]")), 1, set()),
    "buffers of one's own, copied back": (
        loop(each=BUFFERS.format("[p.grad.copy_(t) for p, t in zip(ps, total)]")), 1, set()),
    "ranks that make more steps": (
        wrapped(changed=JOINED, reduced="optimizer.param_groups[0]['betas'] = (0.9 - step / 100, 0.99)")
        .replace("in range(8):", "in joined():", 1), 2, set()),
    "a second model without a scaler": (
        SCALED.format(fused=False, then=f"pass{STEPS}; {IN_TURN}").replace(
            "for step", "other = nn.Linear(8, 1)\nsecond = torch.optim.SGD(other.parameters())\nfor step"),
        1, set()),
    "a second model that is frozen at first": (
        wrapped(changed=f"{SECOND}\nother.requires_grad_(False)", reduced=FROZEN_IN_TURN,
                times=" + other.module(torch.ones(4, 8)).square().mean()"), 2, set()),
    "a prepared ramp as long as the updates": (
        PREPARED.format(schedule=f"torch.optim.lr_scheduler.{RAMP}"), 2, set()),
    "a prepared warm-up of torch as long as the updates": (
        PREPARED.format(schedule="torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)"), 2, set()),
    "a prepared decay counted in updates": (
        PREPARED.format(schedule=DECAY), 2, {"scheduler-calls", "nothing-updated"}),
    "an added head that is reduced by hand": (
        wrapped(by=IN_FSDP, changed=HEAD_OF, reduced=BY_HAND), 2, set()),
}  # fmt: skip
CHEAP = ("sound", "never-zeroed", "a schedule per micro-step", "evaluates in training mode",
         "clipped-each")  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.costly) for name in SCRIPTS]
)
def test_a_mistake_around_updates_is_named_and_its_sound_twin_is_not(tmp_path: Path, name: str) -> None:
    body, ranks, ids = SCRIPTS[name]
    record, _ = observed(tmp_path, body, ranks)
    assert record.status == "ok"
    assert found(record) == ids


@pytest.mark.parametrize("given", ["p", "iter([p])"])
def test_a_limit_of_each_parameter_is_not_that_of_the_whole_norm(tmp_path: Path, given: str) -> None:
    record, _ = observed(tmp_path, loop(each=EACH_CLIPPED.replace("(p,", f"({given},")), 1)
    assert record.job.training.gradient_clipping is None
    assert {step.gradient_norm for step in record.steps} == {None}
    assert any("clipped in parts" in note for note in record.observation.notes)


@pytest.mark.parametrize(
    ("norm", "largest", "counted"),
    [(0.0, 1.0, 1), (0.0, 0.0, 1), (0.5, 1.0, 0), (0.0, math.inf, 0), (0.0, None, 0)],
)
def test_clipping_without_gradients_counts_unless_it_only_asks_for_the_norm(
    norm: float, largest: float | None, counted: int
) -> None:
    habits = Habits()
    habits.clipped(torch.tensor(norm), largest)
    assert habits.clipped_empty == counted


def test_what_divides_a_mean_is_read_from_its_graph() -> None:
    logits, targets = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    mean = functional.cross_entropy(logits, targets)
    assert divisor_of(mean) == 1
    assert divisor_of(mean / 4) == divisor_of(mean * 0.25) == 4
    assert divisor_of(functional.cross_entropy(logits.bfloat16(), targets).float() / 2 / 2) == 4
    assert divisor_of(logits.square().mean() / torch.tensor(3.0)) == 3
    assert divisor_of(-mean / 2) == -2
    assert divisor_of(mean * 0) == math.inf
    summed = functional.cross_entropy(logits, targets, reduction="sum")
    assert divisor_of(summed / 4, of_sum=True) == divisor_of(logits.sum() / 4, of_sum=True) == 4
    assert divisor_of(mean / 4, of_sum=True) is None
    for unknown in (logits.sum() / 4, mean + mean, mean / logits.sum(), mean.detach(), 1.0):
        assert divisor_of(unknown) is None
