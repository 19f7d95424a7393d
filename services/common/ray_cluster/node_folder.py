"""Folders of a further machine, in which its program and the actors there meet."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Name the folders to all that runs on the machine's Ray node.
_MARKS_VARIABLE = "FLOTILLA_RAY_NODE"
_LOGS_VARIABLE = "FLOTILLA_RAY_NODE_LOGS"


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """Marks that one side sets and the other finds, in a folder that is this machine's alone;
    machines may share that of their logs."""

    path: Path
    logs: Path

    @staticmethod
    def of_this_node() -> "NodeFolder":
        """Return the folders of the node on which this process runs. Raises KeyError elsewhere."""
        return NodeFolder(Path(os.environ[_MARKS_VARIABLE]), Path(os.environ[_LOGS_VARIABLE]))

    def to_environment(self) -> Mapping[str, str]:
        """Return the variables by which `of_this_node` finds the folders."""
        return {_MARKS_VARIABLE: str(self.path), _LOGS_VARIABLE: str(self.logs)}

    @property
    def over(self) -> Path:
        """Set by an actor when the service has ended in order."""
        return self.path / "over"

    @property
    def leaving(self) -> Path:
        """Set by the program when the machine has to go."""
        return self.path / "leaving"

    @property
    def joined(self) -> Path:
        """Set by an actor once the service uses the machine."""
        return self.path / "joined"

    def clear_marks(self) -> None:
        """Remove all marks."""
        for mark in (self.over, self.leaving, self.joined):
            mark.unlink(missing_ok=True)
