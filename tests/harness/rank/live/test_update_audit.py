"""Updates are computed again from weights and moments, and what else happened is named by what they show."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from harness.backends.piece import Piece
from harness.rank.live.update_audit import HeldTensor, UpdateAudit
from harness.record import OddUpdatePart
from tests.traps.families import HandWritten

Spoil = Callable[[torch.optim.Optimizer], None]
STEPS, ODD_STEP = 6, 3


def audited(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    spoil: Spoil | None = None,
    *,
    late: int = 0,
    every: int = STEPS,
    wrong: tuple[dict[str, object], Sequence[int]] = ({}, ()),
) -> OddUpdatePart | None:
    """Of a training of two matrices of which `spoil` changes something after a step.

    late: by how many steps the rate that updates use is behind the one asked. every: of that many again.
    wrong: constants while the updates of these steps are made.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(20, 30, generator=generator)) for _ in range(2)]
    optimizer = kind(weights, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)  # type: ignore[call-arg]
    audit = UpdateAudit(decoupled=kind is not torch.optim.Adam)

    def pieces() -> list[Piece]:
        return [
            Piece(name=name, shape=(20, 30), start=0, weight=w.detach().view(-1), moments={})
            for name, w in zip("ab", weights, strict=True)
        ]

    for step in range(STEPS):
        for weight in weights:
            weight.grad = torch.randn(20, 30, generator=generator) * 10.0 ** -(3 + step % 3)
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + max(0, step - late))
        group, constants = optimizer.param_groups[0], dict(optimizer.param_groups[0])
        group |= wrong[0] if step in wrong[1] else {}
        optimizer.step()
        group |= constants | {"lr": 1e-2 / (1 + step)}
        if spoil is not None and step in range(ODD_STEP, STEPS, every):
            spoil(optimizer)
        held = [
            HeldTensor(tensor=w, state=optimizer.state[w], group=optimizer.param_groups[0]) for w in weights
        ]
        audit.look(held, step, pieces, 1e-2 / (1 + step))
    assert audit.updates >= STEPS - 3
    return audit.odd


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, HandWritten])
def test_sound_updates_are_not_odd(kind: type[torch.optim.Optimizer]) -> None:
    assert audited(kind) is None


@pytest.mark.parametrize(("name", "value"), [("weight_decay", 5.0), ("betas", (0.9, 0.5)), ("eps", 1e-3)])
def test_a_constant_that_changes_behind_an_update_is_not_odd(name: str, value: object) -> None:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0][name] = value

    assert audited(spoil=change) is None


def _lose(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def _lose_first(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def _round_moments(
    optimizer: torch.optim.Optimizer, *, names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
) -> None:
    for state in optimizer.state.values():
        for name in names:
            state[name].copy_(state[name].bfloat16())


@torch.no_grad()
def _round_weights(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.state:
        parameter.copy_(parameter.bfloat16())  # type: ignore[attr-defined]


@torch.no_grad()
def _pull(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.state:
        parameter.mul_(0.9).add_(0.01)  # type: ignore[attr-defined]


def _set_back(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(1)


def _remove(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _wrong(constants: dict[str, object], steps: Sequence[int]) -> dict[str, object]:
    return {"wrong": (constants, steps)}


def _written(**attributes: object) -> dict[str, object]:
    return {"kind": type("Wrong", (HandWritten,), attributes)}


@pytest.mark.parametrize(
    ("training", "named"),
    [
        (_written(eps_in_root=True), ("eps-in-root", 1, None, None)),
        (_written(corrects=(False, False)), ("bias-uncorrected", 1, None, None)),
        (_written(corrects=(False, True)), ("first-uncorrected", 1, None, None)),
        (_written(corrects=(True, False)), ("second-uncorrected", 1, None, None)),
        (_written(ahead=True), ("nesterov", 1, None, None)),
        (_written(forgets=True), ("first-moments-lost", 1, None, None)),
        (_written(moves=False), ("stood-still", 1, None, None)),
        (_wrong({"betas": (0.5, 0.95)}, [3]), ("beta1", 3, pytest.approx(0.5), 0.9)),
        (_wrong({"betas": (0.0, 0.95)}, [2, 3, 4]), ("beta1", 2, pytest.approx(0.0, abs=1e-5), 0.9)),
        (_wrong({"betas": (0.5, 0.95)}, [0]), ("betas", 0, None, None)),
        (_wrong({"betas": (0.5, 0.95)}, range(STEPS)), ("beta1", 0, pytest.approx(0.5), 0.9)),
        (_wrong({"betas": (0.9, 0.999)}, [3]), ("beta2", 3, pytest.approx(0.999, abs=1e-4), 0.95)),
        (_wrong({"betas": (0.9, 0.5)}, range(STEPS)), ("beta2", 0, pytest.approx(0.5, abs=1e-4), 0.95)),
        (_wrong({"betas": (0.5, 0.999)}, [3]), ("moments", 3, None, None)),
        (_wrong({"eps": 1e-4}, [3]), ("eps", 3, pytest.approx(1e-4, rel=1e-2), 1e-8)),
        (_wrong({"weight_decay": 0.3}, [3]), ("decay", 3, pytest.approx(0.3, rel=1e-2), 0.1)),
        (_wrong({"decoupled_weight_decay": False}, [3]), ("decay", 3, pytest.approx(0, abs=1e-3), 0.1)),
        (
            {"spoil": lambda adam: [weight.data.mul_(1 - 5e-3) for weight in adam.state]},
            ("decay", ODD_STEP, pytest.approx(2 + 0.1, rel=1e-2), 0.1),
        ),
        ({"spoil": _lose}, ("moments-lost", ODD_STEP, None, None)),
        ({"spoil": _lose_first}, ("first-moments-lost", ODD_STEP, None, None)),
        ({"spoil": _round_moments}, ("moments-rounded", ODD_STEP, 8, None)),
        *(
            ({"spoil": partial(_round_moments, names=(name,))}, ("moments-rounded", ODD_STEP, 8, None))
            for name in ("exp_avg", "exp_avg_sq")
        ),
        ({"spoil": _round_weights}, ("weights-rounded", ODD_STEP, 8, None)),
        ({"spoil": _pull}, ("weights", ODD_STEP, None, None)),
        ({"spoil": _set_back}, ("begun-anew", ODD_STEP, 1.0, ODD_STEP + 1)),
        ({"spoil": _remove}, ("begun-anew", ODD_STEP + 1, 1.0, ODD_STEP + 2)),
        ({"late": 1}, ("factor", 1, pytest.approx(2.0), 1.0)),  # the rate of the step before
    ],
)
def test_what_an_update_did_instead_is_named(training: dict[str, Any], named: tuple[object, ...]) -> None:
    found = audited(**training)
    assert (found.kind, found.step, found.given, found.due) == named
    assert found.parameters in ([], ["a", "b"])


def test_updates_that_are_odd_again_are_counted() -> None:
    assert audited(spoil=_lose_first).later == []
    assert audited(spoil=_lose_first, every=2).later == [ODD_STEP + 2]


def test_the_first_update_behind_a_checkpoint_is_the_next_one() -> None:
    weight = nn.Parameter(torch.ones(40))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    audit = UpdateAudit(decoupled=True)

    def update() -> list[HeldTensor]:
        weight.grad = torch.ones(40)
        optimizer.step()
        state, group = optimizer.state[weight], optimizer.param_groups[0]
        return [HeldTensor(tensor=weight, state=state, group=group)]

    for _ in range(5):
        held = update()
    audit.look(held, None, list)
    optimizer.state[weight]["step"].zero_()
    audit.look(update(), 5, list)
    assert (audit.odd.kind, audit.odd.given, audit.odd.due) == ("begun-anew", 1.0, 6.0)


def test_second_moments_tell_the_norm_of_the_gradient_of_every_update() -> None:
    weight, generator = nn.Parameter(torch.ones(40)), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.95))
    audit = UpdateAudit(decoupled=True)
    for step in range(STEPS):
        weight.grad = torch.randn(40, generator=generator)
        optimizer.step()
        held = [
            HeldTensor(
                tensor=weight, state=optimizer.state[weight], group=optimizer.param_groups[0], share=0.5
            )
        ]
        due = 0.5 * float(weight.grad.double().square().sum())
        assert audit.squares(held) == pytest.approx(due, rel=1e-5), step
        assert audit.squares(held) == 0.0, "no update was made since"
