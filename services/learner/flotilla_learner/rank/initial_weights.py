"""Initial weights of a run, read again from the model's files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from flotilla_common.models.multimodal_models import name_in_files
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.rank.model_loading import find_own_files, read_model


class FileTensors(Mapping[str, Tensor]):
    """Tensors of safetensors files. Each is read on access, and none is kept."""

    def __init__(self, files: Mapping[str, Path], names: Sequence[str]) -> None:
        """`names` are canonical; the files' may be others."""
        self._files = files
        self._own = {name: name_in_files(name, files) for name in names}

    def __getitem__(self, name: str) -> Tensor:
        opened: Any
        own = self._own[name]
        with safe_open(self._files[own], "pt") as opened:
            return opened.get_tensor(own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def open_initial_weights(config: PolicyConfig, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Return the parameters of `policy.model` by these canonical names, in host memory or files.

    All of them are in memory if the files hold others, as for most models with experts. Raises
    ModelError."""
    files = find_own_files(config)
    if all(name_in_files(name, files) in files for name in names):
        return FileTensors(files, names)
    return {name: value.detach() for name, value in read_model(config).named_parameters()}
