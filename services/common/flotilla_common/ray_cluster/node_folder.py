"""Folders of a further machine that its program shares with the actors there."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Variables that give the folders to all processes of the machine's Ray node.
_MARKS_VARIABLE = "FLOTILLA_RAY_NODE"
_LOGS_VARIABLE = "FLOTILLA_RAY_NODE_LOGS"


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """Marks that one side sets and the other finds, in a folder of this machine alone; machines may
    share the folder of their logs."""

    path: Path
    logs: Path

    @staticmethod
    def of_this_node() -> "NodeFolder":
        """Return the folders of the node on which this process runs. Raises KeyError elsewhere."""
        return NodeFolder(Path(os.environ[_MARKS_VARIABLE]), Path(os.environ[_LOGS_VARIABLE]))

    def to_environment(self) -> Mapping[str, str]:
        """Return the variables that `of_this_node` reads."""
        return {_MARKS_VARIABLE: str(self.path), _LOGS_VARIABLE: str(self.logs)}

    @property
    def over(self) -> Path:
        """Mark that an actor sets when the service has ended in order."""
        return self.path / "over"

    @property
    def leaving(self) -> Path:
        """Mark that the program sets when the machine has to leave."""
        return self.path / "leaving"

    @property
    def joined(self) -> Path:
        """Mark that an actor sets once the service uses the machine."""
        return self.path / "joined"

    def clear_marks(self) -> None:
        """Remove all marks."""
        for mark in (self.over, self.leaving, self.joined):
            mark.unlink(missing_ok=True)
