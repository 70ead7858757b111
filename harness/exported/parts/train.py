"""The measured job as a program: replace `build_model`, `batch_of` and `summed_loss` by your own.

`strategy.py` has the lines that your program needs; `settings.json` the constants that were measured.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from strategy import Strategy
from torch import Tensor, nn

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "settings.json").read_text())
SAMPLES = json.loads((HERE / "samples.json").read_text())
IGNORED = -100


def build_model() -> nn.Module:
    """Equal on every rank: the initial weights are read, or drawn from the seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = SETTINGS["model"]
    config = AutoConfig.from_pretrained(HERE / "model")
    arguments = {"attn_implementation": given["attention"], "dtype": torch.float32}
    torch.manual_seed(SETTINGS["seed"])
    if given["pretrained"]:
        model = AutoModelForCausalLM.from_pretrained(
            given["name"], config=config, revision=given["revision"], **arguments
        )
    else:
        model = AutoModelForCausalLM.from_config(config, **arguments)
    if SETTINGS["activation_checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if SETTINGS["compute_dtype"] != "float32":
        # DeepSpeed rounds its fp32 masters so; every strategy began with the same weights.
        dtype = getattr(torch, SETTINGS["compute_dtype"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype).float())
        if SETTINGS["pure"]:
            nn.Module.to(model, dtype)
    return model.train()


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """AdamW with weight decay on the parameters that decay in whole; shards lose their dimensions."""
    given, decaying = SETTINGS["optimizer"], set(SETTINGS["decaying"])
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named:
        groups[name in decaying].append(parameter)
    decay = {True: given["weight_decay"], False: 0.0}
    return torch.optim.AdamW(
        [{"params": groups[key], "weight_decay": decay[key]} for key in decay if groups[key]],
        lr=0.0, betas=given["betas"], eps=given["eps"], foreach=given["foreach"], fused=given["fused"],
    )  # fmt: skip


def batch_of(step: int, micro_step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and labels of one forward pass: micro-steps first, then ranks, then samples."""
    size = SETTINGS["micro_batch_size"]
    first = step * SETTINGS["global_batch_size"] + (micro_step * dist.get_world_size() + rank) * size
    tokens = torch.tensor(SAMPLES["tokens"][first : first + size], device=device)
    return tokens, torch.tensor(SAMPLES["labels"][first : first + size], device=device)


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy, summed over target tokens; `train_step` takes the mean of the global batch."""
    tokens, labels = batch
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].float().reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1),
        ignore_index=IGNORED, reduction="sum",
    )  # fmt: skip


def target_tokens(step: int) -> int:
    """Labels of a global batch that count: those of no rank alone, or ranks would weigh differently."""
    size = SETTINGS["global_batch_size"]
    rows = SAMPLES["labels"][step * size : (step + 1) * size]
    return sum(label != IGNORED for row in rows for label in row[1:])


def train_step(strategy: Strategy, step: int) -> tuple[float, float]:
    """Loss per target token of the global batch, and the gradient norm before clipping."""
    targets, world_size = target_tokens(step), dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=strategy.device)
    strategy.begin_step(SETTINGS["learning_rates"][step])
    for micro_step in range(SETTINGS["accumulation_steps"]):
        batch = batch_of(step, micro_step, dist.get_rank(), strategy.device)
        with strategy.micro_step(micro_step == SETTINGS["accumulation_steps"] - 1):
            loss = summed_loss(strategy.model, batch)
            # Every strategy averages gradients over ranks.
            strategy.backward(loss * (world_size / targets))
        total += loss.detach().double()
    norm = strategy.step()
    dist.all_reduce(total)
    return float(total) / targets, norm


def main() -> None:
    if SETTINGS["deterministic"]:
        torch.use_deterministic_algorithms(True)
    strategy = Strategy(build_model, build_optimizer, SETTINGS)
    if (ranks := dist.get_world_size()) != SETTINGS["world_size"]:
        raise SystemExit(
            f"{ranks} ranks were started; settings.json was exported for {SETTINGS['world_size']}"
        )
    for step in range(len(SETTINGS["learning_rates"])):
        loss, norm = train_step(strategy, step)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"step": step, "loss": loss, "gradient_norm": norm}) + "\n")
            sys.stdout.flush()
    # Before its group: DDP's reducer, freed after it, was seen to wait for a thread of gloo's for ever.
    del strategy
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
