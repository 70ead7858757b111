"""A few numbers that stand for a tensor, so that two runs can be compared without storing tensors.

A sketch is [L2 norm, projection 1, ..., projection K] on sign vectors that depend on the tensor's name
only. Projections are linear: those of a difference are the differences of projections, and their mean
square estimates its squared norm (Alon, Matias, Szegedy, 'The space complexity of approximating the
frequency moments', 1999). A tensor that is c times another has exactly c times its projections.

A content sum tells whether two tensors have the same bits: the sum over all 64-bit words of word times a
random odd number, modulo 2^64 (multilinear hashing; Lemire and Kaser, 'Strongly universal string hashing is
fast', 2014).

Both are sums over elements, so ranks that hold parts of a tensor take those of their parts and add them up.
A complex element counts as two, its real part and its imaginary one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.backends.optimizer.gradients import real_numbers

PROJECTIONS = 8
ROW_ELEMENTS = 1024
CHUNK_ROWS = 1024
CHUNK_ELEMENTS = CHUNK_ROWS * ROW_ELEMENTS


def sketch(name: str, tensor: Tensor) -> list[float]:
    """[L2 norm, projections...] of a tensor of any shape, dtype and device, accumulated in fp64."""
    square, *projections = partial_sketch(name, tensor.reshape(-1), 0)
    return [square**0.5, *projections]


def partial_sketch(name: str, part: Tensor, start: int) -> list[float]:
    """[sum of squares, projections...] of elements `start` and on of a flattened tensor.

    The sign of element i is that of its column times that of its row in rows of ROW_ELEMENTS, so that
    a tensor of n elements costs two small matrices of random signs and not n of them.
    """
    generator = _generator(name)
    columns = (
        _signs((ROW_ELEMENTS, PROJECTIONS), generator).t().contiguous()
    )  # twice as fast as rows @ columns
    total = torch.zeros(PROJECTIONS, dtype=torch.float64)
    square = torch.zeros((), dtype=torch.float64)
    drawn = 0
    for chunk, rows in _chunks(part, start, torch.float64):
        while drawn <= chunk:
            signs = _signs((CHUNK_ROWS, PROJECTIONS), generator)
            drawn += 1
        values = rows.view(-1)
        square += torch.dot(values, values)
        total += (signs[: len(rows)].t() * (columns @ rows.t())).sum(dim=1)
    return [float(square), *total.tolist()]


def content_sum(name: str, part: Tensor, start: int) -> int:
    """Of the bits, in fp32, of elements `start` and on of a flattened tensor; from 0 to 2^64 - 1.

    Sums of parts that together are the tensor add up to its own, modulo 2^64.
    """
    generator = _generator(f"{name}: content")
    columns = _odd_numbers(ROW_ELEMENTS // 2, generator)
    total = 0
    drawn = 0
    for chunk, rows in _chunks(part, start, torch.float32):
        while drawn <= chunk:
            factors = _odd_numbers(CHUNK_ROWS, generator)
            drawn += 1
        total += int(torch.dot(torch.mv(rows.view(torch.int64), columns), factors[: len(rows)]))
    return total % 2**64


def _chunks(part: Tensor, start: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Of the flattened tensor, those that a part meets: number, rows; zero where the part has no elements.

    A chunk's tensor is overwritten by the next: fresh memory costs more than the sums.
    """
    if part.is_complex():
        part, start = real_numbers(part).reshape(-1), 2 * start
    elements = part.numel()
    if not elements:
        return
    first, stop = start // CHUNK_ELEMENTS, -(-(start + elements) // CHUNK_ELEMENTS)
    last_rows = -(-min(start + elements - first * CHUNK_ELEMENTS, CHUNK_ELEMENTS) // ROW_ELEMENTS)
    padded = torch.zeros((last_rows if stop - first == 1 else CHUNK_ROWS) * ROW_ELEMENTS, dtype=dtype)
    for chunk in range(first, stop):
        begin = chunk * CHUNK_ELEMENTS
        low, high = max(begin, start), min(begin + CHUNK_ELEMENTS, start + elements)
        rows = padded[: -(-(high - begin) // ROW_ELEMENTS) * ROW_ELEMENTS]
        rows[: low - begin] = 0
        rows[low - begin : high - begin].copy_(part[low - start : high - start])
        rows[high - begin :] = 0
        yield chunk, rows.view(-1, ROW_ELEMENTS)


def _generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(hashlib.sha256(text.encode()).hexdigest()[:15], 16))


def _signs(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


def _odd_numbers(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1
