"""Names of Python functions in a run spec: `MODULE:FUNCTION`, or `FOLDER/MODULE:FUNCTION` for a
module that is not installed. `MODULE.py` is the same module."""

import re
from dataclasses import dataclass
from pathlib import Path

_WORD = r"[A-Za-z_]\w*"
_PATTERN = re.compile(
    rf"(?:(?P<folder>.*)/)?(?P<module>{_WORD}(?:\.{_WORD})*):(?P<function>{_WORD})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The function `function` of `module`. `folder` is searched before what is installed; "" for
    none."""

    folder: str
    module: str
    function: str

    @classmethod
    def parse(cls, text: str) -> "FunctionName | None":
        """Return None for a text of another form, such as a file's name."""
        found = _PATTERN.fullmatch(text)
        if found is None:
            return None
        return cls(found["folder"] or "", found["module"].removesuffix(".py"), found["function"])

    @property
    def package(self) -> str:
        """The top package, or the module itself if it is in none."""
        return self.module.partition(".")[0]

    def lies_in(self, folder: Path) -> bool:
        """Return True if the module is a file of `folder`, or of packages in it."""
        path = folder.joinpath(*self.module.split("."))
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()

    def __str__(self) -> str:
        return f"{self.folder}/{self.dotted}" if self.folder else self.dotted

    @property
    def dotted(self) -> str:
        return f"{self.module}:{self.function}"
