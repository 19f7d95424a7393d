"""Folder of a further machine, in which its program and the rank actors there meet."""

import os
from dataclasses import dataclass
from pathlib import Path

# Names the folder to all that runs on the machine's Ray node.
NODE_FOLDER_VARIABLE = "FLOTILLA_RAY_NODE"


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """Marks that one side sets and the other finds."""

    path: Path

    @staticmethod
    def of_this_node() -> "NodeFolder":
        """Return the folder of the node on which this process runs. Raises KeyError elsewhere."""
        return NodeFolder(Path(os.environ[NODE_FOLDER_VARIABLE]))

    @property
    def over(self) -> Path:
        """Set by an actor when the learner has ended in order."""
        return self.path / "over"

    @property
    def leaving(self) -> Path:
        """Set by the program when the machine has to go."""
        return self.path / "leaving"

    @property
    def joined(self) -> Path:
        """Set by an actor that is to run a rank here."""
        return self.path / "joined"

    def clear_marks(self) -> None:
        """Make the folder, without marks."""
        self.path.mkdir(parents=True, exist_ok=True)
        for mark in (self.over, self.leaving, self.joined):
            mark.unlink(missing_ok=True)
