"""Measures what the audit of updates takes after a step over the step itself, of one rank in one process.

Processor time, so that other work on the machine changes neither side. The audit is what `Observer.audit`
does after each step of Adam, outside of what is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

import measuring
import step_time
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.rank.live.update_audit import HeldTensor, UpdateAudit

TARGET = 0.05
WIDTHS = (128, step_time.HIDDEN_SIZE)
"""Of the default job and of the other benchmarks."""
SAMPLES, TOKENS = 4, 128
"""Of a rank's micro-batch in the default job on two ranks."""
WARMUP_STEPS = 3


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each width")
    options = parser.parse_args()
    return measuring.present(measure(options.steps), as_json=options.json)


def measure(steps: int = 20) -> list[measuring.Result]:
    """One ratio for each width."""
    return [one_width(width, steps) for width in WIDTHS]


def one_width(width: int, steps: int) -> measuring.Result:
    """Medians over steps of one training; exits if an update was not looked at or found odd."""
    before, parameters = torch.get_num_threads(), 0
    torch.set_num_threads(1)
    try:
        model = _model(width)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer, audit = torch.optim.AdamW(model.parameters(), lr=1e-3), UpdateAudit(decoupled=True)
        tokens = torch.randint(model.config.vocab_size, (SAMPLES, TOKENS))
        pairs = [_step(model, optimizer, audit, tokens, step) for step in range(WARMUP_STEPS + steps)]
    finally:
        torch.set_num_threads(before)
    if audit.updates != WARMUP_STEPS + steps - 1 or audit.odd is not None:
        raise SystemExit(f"{audit.updates} updates were looked at, odd: {audit.odd}: not what a run does")
    ratios = [audited / trained for audited, trained in pairs[WARMUP_STEPS:]]
    audited, trained = (statistics.median(side) for side in zip(*pairs[WARMUP_STEPS:], strict=True))
    return measuring.Result(
        name=f"audit of updates, {parameters / 1e6:.2f} M parameters",
        ratio=audited / trained,
        lowest=min(ratios),
        highest=max(ratios),
        target=TARGET,
        detail=f"{audited * 1e3:.1f} ms over {trained * 1e3:.1f} ms of processor time, {steps} steps",
    )


def _model(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=width, intermediate_size=width * 11 // 4,
        num_hidden_layers=step_time.LAYERS, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    audit: UpdateAudit,
    tokens: torch.Tensor,
    step: int,
) -> tuple[float, float]:
    """Seconds of the audit and of the step."""
    begin = time.process_time()
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    trained = time.process_time()
    held = list(_held(optimizer))
    audit.look(held, step, tuple)
    if audit.squares(held) is None and step:
        raise SystemExit(f"step {step}: the sum of squared gradients is not known")
    return time.process_time() - trained, trained - begin


def _held(optimizer: torch.optim.Optimizer) -> Iterator[HeldTensor]:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            yield HeldTensor(tensor=tensor, state=optimizer.state[tensor], group=group)


if __name__ == "__main__":
    sys.exit(main())
