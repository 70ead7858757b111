"""Third parties' backends: what pip would leave of their distribution."""

from collections.abc import Mapping
from pathlib import Path

from harness.backends import registry


def register(
    folder: Path, entry_points: Mapping[str, str], name: str = "planted", version: str = "1.0"
) -> Path:
    """Make backends known, by name and 'module:Class', to whoever has this folder on its path.

    Returns the file that lists them.
    """
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    information.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{backend} = {target}" for backend, target in entry_points.items()]
    listed = information / "entry_points.txt"
    listed.write_text("\n".join([f"[{registry.ENTRY_POINT_GROUP}]", *lines]) + "\n")
    return listed
