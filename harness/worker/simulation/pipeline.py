"""What stages of a pipeline (torch 2.13) ask of each other before their first micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining import PipelineStage

from harness.backends.base import Engine
from harness.backends.pipeline.engine import PipelineEngine

AGREED = "stages do not vote on static shapes: all have them"


class Agreed:
    """The result of a vote that every stage won."""

    def item(self) -> int:
        return 1


@contextmanager
def stages_agree() -> Iterator[None]:
    """A vote passes from stage to stage in the first step; a stage that is not there would have voted 0."""

    def vote(*_: Any, **__: Any) -> Agreed:
        return Agreed()

    with (
        patch.object(PipelineStage, "_warmup_forward_vote", vote),
        patch.object(PipelineStage, "_warmup_backward_result", vote),
    ):
        yield


def what_stages_skip(engine: Engine) -> list[str]:
    """What was done otherwise than in a run."""
    return [AGREED] if isinstance(engine, PipelineEngine) else []
