"""Recognises ranks that called different collectives, from what gloo says where their sizes differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from harness.record import ErrorPart
from harness.run_directory.rank_events import RankEvents
from harness.run_directory.rank_state import read_position
from harness.run_directory.request import rank_log
from harness.run_directory.side_files import log_tail, read_log
from harness.run_directory.stuck import rank_states

KIND = "CollectiveMismatch"
_GLOO = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""gloo/transport/tcp/pair.cc; thrown on a thread of its own, so that the process usually aborts."""


def mismatch_error(run_directory: Path, events: Mapping[int, RankEvents]) -> ErrorPart | None:
    """What a record says of ranks that disagree on a collective; None: no rank noticed that they do.

    Whoever received the wrong number of bytes noticed it; which rank is at fault cannot be told.
    """
    for rank, of_rank in events.items():
        said = "\n".join(failure.message for failure in of_rank.failures)
        log = "" if of_rank.has_ended else read_log(rank_log(run_directory, rank))
        if (found := _GLOO.search(f"{said}\n{log}")) is not None:
            position = read_position(run_directory, rank)
            return ErrorPart(
                kind=KIND,
                message=f"the ranks disagree on a collective: rank {rank} received {found[1]} bytes where it "
                f"waited for {found[2]}; `ranks` and the logs show where each rank was",
                step=position.step if position else None,
                phase=position.phase if position else None,
                log_tail=log_tail(rank_log(run_directory, rank)),
                ranks=rank_states(run_directory, len(events)),
            )
    return None
