import pytest

from tests.traps.matrix import planted_matrix


@pytest.fixture(scope="package")
def matrix(tmp_path_factory: pytest.TempPathFactory):
    with planted_matrix(tmp_path_factory.mktemp("axes")) as matrix:
        yield matrix
