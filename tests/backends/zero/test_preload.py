"""What the fork server imports for DeepSpeed's ranks."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from harness.backends.zero import preload as zero_preload

pytestmark = pytest.mark.long(seconds=10)


def doubled(value: int) -> int:
    return 2 * value


def test_a_function_is_compiled_once_and_only_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, dict[str, Any]]] = []

    def compile_(function: Callable[[int], int], **settings: Any) -> Callable[[int], int]:
        made.append((function, settings))
        return lambda value: function(value) + 1

    monkeypatch.setattr(zero_preload, "COMPILE", compile_)
    deferred = zero_preload.at_first_call(doubled, dynamic=True)
    assert made == []
    assert (deferred(2), deferred(3), deferred.__name__) == (5, 7, "doubled")
    assert made == [(doubled, {"dynamic": True})]


@pytest.mark.costly
def test_torch_s_compiler_is_not_imported_for_deepspeed_alone() -> None:
    code = (
        "import sys, torch; before = torch.compile; import harness.backends.zero.preload; "
        "import deepspeed.runtime.engine; assert torch.compile is before; "
        "assert 'deepspeed.runtime.zero.muon.original_muon' in sys.modules; "
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
