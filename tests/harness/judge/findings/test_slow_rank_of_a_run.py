"""A rank that really is slower is found in a real run, by the clock of each rank's phases."""

from pathlib import Path

import pytest

from harness.rank.probes.time import read
from tests.harness.cli.command_line import SMALL, harness, records
from tests.harness.judge.findings.told import told
from tests.plugins import register

PLUGIN = """
import time

from harness.backends.ddp import DdpBackend


class SlowRank(DdpBackend):
    '''Rank 1 takes 0.4 s longer for each forward pass: more than tests next to this one take from it.'''

    def prepare(self, build_model, build_optimizer, context):
        engine = super().prepare(build_model, build_optimizer, context)
        forward = engine.forward

        def slow_forward(batch):
            loss = forward(batch)
            time.sleep(0.4 * context.world.rank)
            return loss

        engine.forward = slow_forward
        return engine
"""


@pytest.mark.skipif(read() is None, reason="this system does not say who used the processors")
def test_a_slow_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_plugin.py").write_text(PLUGIN)
    register(tmp_path, {"slow-rank": "slow_plugin:SlowRank"})
    monkeypatch.syspath_prepend(tmp_path)
    steps = ["--set", "training.steps=12", "--set", "measure.warmup_steps=1"]
    done = harness("run", "--backend", "slow-rank", "--nproc", "2", *SMALL, *steps, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = records(tmp_path / "runs")
    # The other rank waits in the backward pass, so whole steps last as long on both and tell nothing.
    (finding,) = told([record], "slow-rank")
    assert finding.values["rank"] == 1
    assert finding.values["what"] == "fetching and forward pass"
