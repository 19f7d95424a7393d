"""Any name of torchvision, to be imported and never used: images are not read.

vLLM imports the image processors of transformers with every multimodal model. On a CPU the real
package is a build for CUDA, which does not load."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0"


class _Absent(type):
    """A class of the real package; its attributes are of the same kind."""

    def __getattr__(cls, name: str) -> "_Absent":
        return _find_name(name)

    def __call__(cls, *given: Any, **named: Any) -> Any:
        raise RuntimeError("images are not read: torchvision is not installed")


class _AbsentModule(ModuleType):
    """A module of the real package."""

    def __getattr__(self, name: str) -> _Absent:
        return _find_name(name)


class _Finder:
    """Finder and loader of the real package's modules."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        ours = name.startswith(f"{__name__}.")
        return ModuleSpec(name, cls, is_package=True) if ours else None  # pyright: ignore[reportArgumentType]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Do nothing: names are made when they are asked for."""


def _find_name(name: str) -> _Absent:
    # Python asks objects for many of these to learn what they are.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


__getattr__ = _find_name
sys.meta_path.append(_Finder)  # pyright: ignore[reportArgumentType]
