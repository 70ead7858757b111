"""The import path `backends` before `harness.backends`, as its alias; version 0.2 drops it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD = "backends"
NEW = "harness.backends"


class _Alias(MetaPathFinder, Loader):
    """Gives `backends.x` the module object of `harness.backends.x`, so that classes exist once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(f"{OLD}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name.replace(OLD, NEW, 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system gave the module the alias's spec; it keeps its own.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def redirect() -> None:
    """Make `import backends` and what lies below it give the modules of `harness.backends`."""
    warnings.warn(
        "import 'harness.backends' instead of 'backends', which version 0.2 drops",
        FutureWarning,
        stacklevel=3,
    )
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
    sys.modules[OLD] = import_module(NEW)
