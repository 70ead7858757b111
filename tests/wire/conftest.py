"""One namespace for the tests of this folder, one after the other."""

from collections.abc import Iterator

import pytest

from .namespace import Namespace, why_not


@pytest.fixture(scope="package")
def namespace() -> Iterator[Namespace]:
    reason = why_not()
    if reason:
        # Many containers forbid it, and nothing else here can count what one job alone sends.
        pytest.skip(f"no network namespace here: {reason}")
    namespace = Namespace()
    yield namespace
    namespace.close()
