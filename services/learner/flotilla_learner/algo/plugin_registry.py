"""Named estimators and losses, which a user's own module can extend.

A module named in `algorithm.plugins` is imported by every rank before a name is looked up::

    from flotilla_learner.plugins import ADVANTAGES, AlgorithmConfig, BatchRewards, TokenValues

    @ADVANTAGES.register("centred")
    def centred(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]: ...
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from flotilla_common.spec.old_names import explain_old_import

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries that `[learner.algorithm]` refers to by name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, sorted."""
        return tuple(sorted(self._entries))

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds an entry. Raises ValueError if the name is taken."""

        def add_entry(entry: T) -> T:
            if name in self._entries:
                raise ValueError(
                    f"{self._kind} {name!r} is already registered: choose another name"
                )
            self._entries[name] = entry
            return entry

        return add_entry

    def get(self, name: str) -> T:
        """Return the entry called `name`. Raises ValueError that lists the known ones."""
        if name not in self._entries:
            close = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"unknown {self._kind} {name!r}: {hint}known are {', '.join(self.names)}; "
                "a custom one is registered by a module that algorithm.plugins names"
            )
        return self._entries[name]


def load_plugins(modules: Iterable[str]) -> None:
    """Import the modules, which register their entries; importing twice has no further effect.

    They may be in the working directory, which is last on the path so that it hides nothing.
    Raises ValueError that names a module that cannot be imported."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            moved = explain_old_import("".join(traceback.format_exception(error)))
            place = "it must be in the learner's working directory, or on its PYTHONPATH"
            raise ValueError(
                f"algorithm.plugins: {module!r} cannot be imported: {error}; {moved or place}"
            ) from error
