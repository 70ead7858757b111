"""Products of linear layers in fp8: torchao's, with one scale per row, emulated on every device."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from harness.backends.base import Unsupported
from harness.backends.blocks import transformer_blocks

PACKAGE = "torchao"


def narrow_products(model: nn.Module) -> None:
    """Have the linear layers of a model's blocks multiply in fp8, in place; weights stay as they are.

    A layer's class is changed, since a new layer in its place would lose its hooks and its place in tied
    weights. Emulated: operands are rounded to e4m3 and multiplied in the dtype that they had. Raises
    Unsupported without torchao or for a model without such layers.
    """
    blocks = transformer_blocks(model).values()
    layers = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise Unsupported("training.precision=fp8: the model's blocks have no plain linear layer")
    narrow, attributes = _float8()
    for layer in layers:
        layer.__class__ = narrow
        vars(layer).update(attributes)


def narrow_layers(model: nn.Module) -> int:
    """Layers of a live model that multiply in fp8."""
    return sum("Float8Linear" in {base.__name__ for base in type(m).__mro__} for m in model.modules())


def _float8() -> tuple[type[nn.Linear], dict[str, Any]]:
    """torchao's class, and what an instance has beyond a linear layer."""
    try:
        version(PACKAGE)
    except PackageNotFoundError as error:
        raise Unsupported(
            f"training.precision=fp8 needs {PACKAGE}, which is not installed: pip install {PACKAGE}"
        ) from error
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    example = Float8Linear(1, 1, config=config, device="meta")
    plain = vars(nn.Linear(1, 1, device="meta"))
    return Float8Linear, {name: value for name, value in vars(example).items() if name not in plain}
