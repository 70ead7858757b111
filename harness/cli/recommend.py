"""`harness recommend`: which strategy and batch to take on GPUs that are not here."""

from __future__ import annotations

import json
from typing import Any

import click

from harness.cli.estimate import answers_of, question_options
from harness.cli.options import Machine, common, machine_options, planned_options
from harness.cli.output import echo


@click.command()
@question_options
@machine_options()
@common
@planned_options
def recommend(machine: Machine, as_json: bool, **asked: Any) -> int:
    """Rank strategies, batches, checkpointing and offload for a model on GPUs.

    By predicted memory and speed. Says why the others lose, what is uncertain, when other parallelism is
    called for, and how to measure the best ones. The answer of `harness estimate` with the batch open.
    """
    found = answers_of(machine, **asked, opens=True)
    from harness.plan.document import recommendation
    from harness.plan.text import answer_lines

    echo("\n".join(answer_lines(found)), err=as_json)
    if as_json:
        documents = [recommendation(answer) for answer in found]
        echo(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
    return 0
