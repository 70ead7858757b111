"""A digest of all master weights, equal for equal weights whatever the strategy that holds them."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.backends.base import Engine
from harness.record import WeightsPart
from harness.worker.sketch import sketch


@dataclass(frozen=True, kw_only=True)
class _Digested:
    """Of one tensor."""

    line: str
    """Name, shape and SHA-256."""
    sketch: list[float]
    elements: int


@dataclass(frozen=True, kw_only=True)
class WeightShare:
    """What one rank found of all tensors."""

    checksums: Mapping[str, int]
    """Of every tensor as this rank has it."""
    digested: Mapping[str, _Digested]
    """Of those that are this rank's share."""


def digest_share(engine: Engine) -> WeightShare:
    """Gather the weights tensor by tensor and digest this rank's share of them; a collective.

    Digests take time, so every rank takes some; a checksum of each tells whether all ranks have the same.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = [0] * world_size
    checksums: dict[str, int] = {}
    digested: dict[str, _Digested] = {}
    for name, tensor in engine.full_parameters():
        contiguous = tensor.contiguous()
        owner = shares.index(min(shares))
        shares[owner] += tensor.numel()
        if world_size > 1:
            checksums[name] = zlib.crc32(_content(contiguous))
        if owner == rank:
            digested[name] = _digest(name, contiguous)
        del tensor, contiguous  # before the next one is gathered
    return WeightShare(checksums=checksums, digested=digested)


def combined(share: WeightShare, engine: Engine) -> WeightsPart:
    """SHA-256 over the sorted (name, SHA-256 of the fp32 bytes), L2 norm, count, a sketch of each.

    A collective. Where ranks have different weights, each returns what it has itself. The norm is
    accumulated in fp64. Without a sketch where a weight is not finite.
    """
    shares: list[WeightShare] = [share] * dist.get_world_size()
    if len(shares) > 1:
        dist.all_gather_object(shares, share)
    if any(other.checksums != share.checksums for other in shares):
        return _part({name: _digest(name, tensor.contiguous()) for name, tensor in engine.full_parameters()})
    found = {name: digested for other in shares for name, digested in other.digested.items()}
    return _part({name: found[name] for name in share.checksums or found})


def digest_weights(engine: Engine) -> WeightsPart:
    """Both in one; a collective."""
    return combined(digest_share(engine), engine)


def _digest(name: str, tensor: Tensor) -> _Digested:
    content = hashlib.sha256(_content(tensor)).hexdigest()
    return _Digested(
        line=f"{name} {tuple(tensor.shape)} {content}", sketch=sketch(name, tensor), elements=tensor.numel()
    )


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _part(digested: Mapping[str, _Digested]) -> WeightsPart:
    lines = sorted(one.line for one in digested.values())
    sketches = {name: one.sketch for name, one in digested.items()}
    finite = all(math.isfinite(value) for values in sketches.values() for value in values)
    return WeightsPart(
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        l2_norm=math.fsum(values[0] ** 2 for values in sketches.values()) ** 0.5,
        parameter_count=sum(one.elements for one in digested.values()),
        sketch=sketches if finite else None,
    )
