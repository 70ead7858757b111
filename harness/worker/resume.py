"""Continues a checkpoint of another run: loaded before the first step, and checked against what was saved."""

from __future__ import annotations

from harness.backends.base import Engine, Unsupported
from harness.backends.checkpoints.checksum import moments_checksum
from harness.errors import HarnessError
from harness.record import WeightsPart
from harness.record.model import weights_differ
from harness.resume import require_steps_left
from harness.run_directory.request import Resume
from harness.worker.checkpoint import LOADING_PHASE, load, measured, progress_of
from harness.worker.loop import Loop


def begin_training(loop: Loop, resume: Resume | None) -> None:
    """Bring the engine into the state in which its first step begins; a collective where it resumes.

    From here on its memory is read.
    """
    loop.engine.train(True)
    if resume is not None:
        loop.position.enter("load checkpoint")
        _load(loop, resume)
        loop.position.enter("setup")
    loop.probes.attach(loop.engine, loop.sampler.held_tensors)


def _load(loop: Loop, resume: Resume) -> None:
    """Raises Unsupported where the backend cannot read the format, and HarnessError if no step is left, or if
    the moments, the step count or the loss scale are not what was saved.
    """
    saved, engine, probes = resume.saved, loop.engine, loop.probes
    require_steps_left(saved, loop.steps)
    if saved.format == "native" and saved.native_format != engine.native_format():
        raise Unsupported(
            f"the checkpoint of run {saved.run_id} is native to {saved.native_format}, which "
            f"{engine.native_format()} does not read; save it with measure.checkpoint=neutral"
        )
    with (
        measured("load", saved.format, saved.step, resume.folder, loop.world, loop.events),
        probes.counting(LOADING_PHASE),
    ):
        load(engine, resume.folder, saved.format)
    _require_moments(engine, resume)
    _require_progress(engine, resume)
    with probes.counting(LOADING_PHASE):
        engine.rehearse(loop.probe_batch())


def _require_moments(engine: Engine, resume: Resume) -> None:
    saved = resume.saved
    if saved.moments_checksum is None or moments_checksum(engine) == saved.moments_checksum:
        return
    raise HarnessError(
        f"the moments of Adam after loading are not those that run {saved.run_id} saved: the checkpoint is "
        "damaged, or this backend keeps its moments in another dtype"
    )


def _require_progress(engine: Engine, resume: Resume) -> None:
    progress, saved = progress_of(engine), resume.saved
    if progress is None:
        return
    for name, found, expected in (
        ("updates", progress.updates, saved.updates),
        ("loss scale", progress.loss_scale, saved.loss_scale),
    ):
        if expected is not None and found != expected:
            raise HarnessError(
                f"after loading the checkpoint of run {saved.run_id} the optimizer's {name}: {found}, saved "
                f"were {expected}; the training would not go on as it was"
            )


def require_saved_weights(resume: Resume | None, loaded: WeightsPart | None) -> None:
    """Raise HarnessError if the master weights are not those that were saved, where both have a digest."""
    if resume is None or loaded is None or not weights_differ(resume.saved.weights_digest, loaded.digest):
        return
    saved = resume.saved
    raise HarnessError(
        f"the weights after loading have the digest {loaded.digest[:12]}, those that run {saved.run_id} "
        f"saved {str(saved.weights_digest)[:12]}: the checkpoint is damaged, or this backend keeps its "
        "master weights in another dtype"
    )
