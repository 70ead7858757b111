"""One Slurm cluster for the tests of a process, gone with it however it ends."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.packages import unmet
from tests.cluster.slurm import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
NODES = 4


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    if not request.config.getoption("--cluster"):
        # Root, Debian's packages and a quarter of an hour are not every machine's; CI asks for it.
        pytest.skip("starts a Slurm cluster of its own: give --cluster, or run `make test-cluster`")
    prefix = Path(os.environ.get("SLURM_PREFIX", ROOT / ".cluster" / "slurm"))
    why_not = unmet(prefix)
    if why_not is not None:
        # Where a cluster is required, its absence is no reason to pass without testing.
        (pytest.fail if os.environ.get("REQUIRE_CLUSTER") else pytest.skip)(why_not)
    cluster = SlurmCluster(tmp_path_factory.mktemp("cluster") / "slurm", prefix, NODES)
    yield cluster
    cluster.close()


@pytest.fixture
def quiet_cluster(cluster: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    """Leave no job and no slow link behind for the next test."""
    yield
    cluster.nodes.shape(None)
    cluster.command("scancel", "--user=root", cwd=tmp_path)
