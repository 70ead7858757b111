"""How hooks leave what they are put into."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.rank.observing.hooks import Roots, _with_gloo, replace


def test_the_search_for_modules_ends_once_and_leaves_what_others_put_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", before)
    seen: list[nn.Module] = []
    nothing: Any = dict.fromkeys(("forward_ends", "module_begins", "module_ends"), lambda *_: None)
    roots = Roots(SimpleNamespace(**nothing, forward_begins=lambda root, *_: seen.append(root)))  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2))
    for _ in range(2):
        assert nn.Module.__call__ is not before
        model(torch.ones(1, 2))
        roots.end_step()
    assert nn.Module.__call__ is before
    roots.look_again()
    model(torch.ones(1, 2))
    roots.end_step()
    assert nn.Module.__call__ is not before
    roots.end_step()
    assert nn.Module.__call__ is before

    def of_script(module: nn.Module, *arguments: Any) -> Any:
        return before(module, *arguments)

    monkeypatch.setattr(nn.Module, "__call__", of_script)
    model(torch.ones(1, 2))
    roots.end_step()
    assert nn.Module.__call__ is of_script
    assert seen == [model] * 4


@pytest.mark.parametrize(
    ("given", "backend", "notes"),
    [({}, "gloo", 1), ({"backend": "mpi"}, "mpi", 0), ({"cpu": True}, "gloo", 0)],
)
def test_a_loop_is_given_gloo_unless_it_names_a_transport_and_a_note_says_so(
    given: dict[str, Any], backend: str, notes: int
) -> None:
    class State:
        """As Accelerate's `PartialState`."""

        _shared_state: dict[str, str] = {}

        def __init__(self, cpu: bool = False, **named: Any) -> None:
            self.backend = named["backend"]

    told: list[str] = []
    replace(State, "__init__", _with_gloo(SimpleNamespace(note=told.append)))  # type: ignore[arg-type]
    assert State(**given).backend == backend
    assert len(told) == notes


class _Switches(nn.Linear):
    """Switches gradients on, as a model does whose forces are gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)
        return super().forward(x)


def test_a_pass_ends_as_what_it_began_as(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    told: list[str] = []
    names = (
        "module_begins",
        "module_ends",
        "note",
        "forward_begins",
        "forward_ends",
        "other_begins",
        "other_ends",
        "pass_fails",
    )
    Roots(SimpleNamespace(**{n: lambda *_, n=n: told.append(n) for n in names}))  # type: ignore[arg-type]
    model, other = nn.Linear(2, 2), _Switches(2, 2)
    model(torch.ones(2))
    with torch.no_grad():
        other(torch.ones(2))
    assert told == ["forward_begins", "forward_ends", "other_begins", "other_ends"]
