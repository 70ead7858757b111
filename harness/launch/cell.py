"""Runs one cell on this machine."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from harness.backends import registry
from harness.cells import Cell, make_request
from harness.errors import HarnessError
from harness.launch.launcher_settings import launcher_settings
from harness.launch.local import EventHandler, LocalLauncher, require_folder
from harness.launch.owner import forget_owner, keep_outcome, note_owner
from harness.provenance import load_average
from harness.record import PredictionPart, Record
from harness.run_directory.assemble import assemble, assemble_refused, record_of_fault
from harness.run_directory.remains import remove_remains
from harness.run_directory.request import RunRequest
from harness.spec import Experiment
from harness.spec.pairs import why_refused
from harness.store import Store, keep_record

FOLDER_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""What writing into the folder of a run says that was removed, replaced or closed: others can be written."""


def run_cell(
    cell: Cell,
    experiment: Experiment,
    store: Store,
    launcher: LocalLauncher,
    *,
    command: list[str],
    on_event: EventHandler,
    port: int | None = None,
    prediction: PredictionPart | None = None,
    refusal: str | None = None,
) -> Record:
    """Run one cell on this machine; the record is in the store when this returns.

    `refusal`: why its ranks are not started, which the record then says.
    """
    load = load_average()
    more = {"prediction": prediction, "launcher_settings": launcher_settings(os.environ)}
    request = make_request(cell, experiment, launcher.device, command).model_copy(update=more)
    directory = _new_folder(store, request)
    refusal = refusal or why_refused(cell.backend, cell.world_size, cell.job)
    outcome = None
    try:
        if refusal is not None:
            record = assemble_refused(directory, request, refusal)
        else:
            for extension in registry.parse(cell.backend)[1].extensions():
                launcher.build(extension)
            outcome = launcher.run(directory, request, on_event=on_event, port=port)
            require_folder(directory)
            record = assemble(directory, request, outcome)
    except Exception as error:  # whatever it is, this cell failed, and the others go on
        record = record_of_fault(directory, request, error)
    remove_remains(directory, request)
    # What the run found, not what it left.
    found = record.environment.model_copy(update={"load_average": load})
    record = record.model_copy(update={"environment": found})
    try:
        try:
            record = keep_record(directory, record)
        except OSError as error:
            if error.errno not in FOLDER_LOST:
                raise
            directory, request = _replacement(store, directory, request)
            record = keep_record(directory, record.model_copy(update={"run_id": request.run_id}))
    except OSError as error:
        if outcome is not None:
            keep_outcome(directory, outcome)
        raise HarnessError(f"record of run '{directory}' cannot be written: {error.strerror}") from error
    forget_owner(directory)
    return record


def _replacement(store: Store, lost: Path, request: RunRequest) -> tuple[Path, RunRequest]:
    """A folder for the record of a run whose own cannot be written: of its name where nothing has taken it.

    Raises HarnessError.
    """
    if os.path.lexists(lost):
        request = request.model_copy(update={"run_id": f"{request.run_id[:-6]}{secrets.token_hex(3)}"})
    return _new_folder(store, request), request


def _new_folder(store: Store, request: RunRequest) -> Path:
    """The folder of a run with its request. Raises HarnessError."""
    try:
        directory = store.run_directory(request.run_id)
        note_owner(directory)
        request.write(directory)
    except OSError as error:
        folder = store.root / request.run_id
        if not isinstance(error, FileExistsError):
            store.discard(request.run_id)
        raise HarnessError(f"run '{folder}' cannot be written: {error.strerror}") from error
    return directory


def modules_to_preload(experiment: Experiment, backends: Iterable[str]) -> list[str]:
    """Modules that these runs import besides torch and transformers, for the fork server."""
    needed = {package for label in backends for package in registry.parse(label)[0].packages}
    modules = [*sorted(needed & {"deepspeed", "accelerate"}), "torch.profiler._cupti_monitor"]
    if "transformers" in needed:
        modules.append("transformers.trainer")
    if "deepspeed" in needed:
        modules.append("harness.backends.zero_preload")
    if experiment.model.name is None:
        model_type = experiment.model.config_values()["model_type"]
        modules.append(f"transformers.models.{model_type}.modeling_{model_type}")
    return modules
