"""What Trainer does with batches, loss and updates of its own, where the harness hands it the job's."""

from __future__ import annotations

from typing import Any

LIBRARY_ALONE = "library_alone"
"""In `Effective.details`: what a library would do by itself, by subject."""


def alone(trainer: Any) -> dict[str, str]:
    """Read from a live Trainer and its arguments, by subject (transformers 5.23, trainer.py)."""
    arguments = trainer.args
    return {
        "loss": _loss(trainer),
        "batches": _batches(trainer),
        "optimizer": str(getattr(arguments.optim, "value", arguments.optim)),
        "gradient clipping": f"{type(arguments).max_grad_norm:g}",
        "schedule": str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
        + f", {arguments.warmup_steps:g} warm-up steps, one step for each update",
    }


def _loss(trainer: Any) -> str:
    """`get_batch_samples`, `_get_num_items_in_batch` and `training_step`."""
    if not trainer.model_accepts_loss_kwargs:
        return "mean of each micro-batch / accumulation steps"
    counted = "labels[..., 1:]" if trainer._loss_shifts_labels else "labels"
    devices = "all devices" if trainer.args.average_tokens_across_devices else "this device"
    return f"sum / num_items_in_batch ({counted} that are not -100, of {devices})"


def _batches(trainer: Any) -> str:
    """`_get_train_sampler`, then `BatchSamplerShard` (accelerate 1.15, data_loader.py)."""
    accelerator = trainer.accelerator
    if accelerator.dispatch_batches:
        share = "rank 0 reads all batches and sends parts"
    elif accelerator.split_batches:
        share = "each rank takes its part of a batch"
    else:
        share = "ranks take batches in turn"
    if trainer.args.dataloader_drop_last:
        last = "an incomplete last round is dropped"
    elif accelerator.even_batches:
        last = "the last round is filled up with the first samples"
    else:
        last = "the last round is left uneven"
    return f"order: {trainer.args.train_sampling_strategy}; {share}; {last}"
