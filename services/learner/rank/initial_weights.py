"""Initial weights of a run, read again from the model's files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from services.common.spec import PolicyConfig
from services.learner.rank.model_loading import find_own_files, read_model


class FileTensors(Mapping[str, Tensor]):
    """Tensors of safetensors files. Each is read on access, and none is kept."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        opened: Any
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_initial_weights(config: PolicyConfig, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Return the parameters of `policy.model` by these canonical names, in host memory or files.

    All of them are in memory if the files use other names, as for most models with experts.
    Raises ModelError."""
    files = find_own_files(config)
    if all(name in files for name in names):
        return FileTensors({name: files[name] for name in names})
    return {name: value.detach() for name, value in read_model(config).named_parameters()}
