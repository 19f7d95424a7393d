"""Build hook of hatchling: adds the run specs and the demo's pinned packages to what it builds, by
their paths in the repository; `flotilla_launcher.cli.shipped_files` finds them."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SHIPPED = ("deploy/runs", "requirements/cpu.txt", "requirements/torch-cpu.txt")
_FOLDER = "flotilla_launcher/shipped"


class ShipFiles(BuildHookInterface[Any]):
    """Adds the files to wheels and source archives; an editable install has the repository's."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # A source archive brings them along.
        if version == "editable" or (Path(self.root) / _FOLDER).exists():
            return
        root = Path(self.root).parents[1]
        for name in _SHIPPED:
            # An image is built without some: it runs services, and no demo.
            if (root / name).exists():
                build_data["force_include"][str(root / name)] = f"{_FOLDER}/{name}"
