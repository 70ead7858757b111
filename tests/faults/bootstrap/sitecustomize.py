"""Plants faults in ranks: every Python process of a comparison loads it, from PYTHONPATH."""

import os
import sys

if "PLANTED_FAULTS" in os.environ:
    from harness.launch.bootstrap.sitecustomize import AfterImport

    def _plant(module: object) -> None:
        from tests.faults.plants import plant

        plant(module)

    _finder = AfterImport()
    sys.meta_path.insert(0, _finder)  # type: ignore[arg-type]
    _finder.on_import("harness.run_directory.rank_state", _plant)
