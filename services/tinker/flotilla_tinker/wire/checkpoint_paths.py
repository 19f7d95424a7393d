"""Paths of checkpoints: `tinker://MODEL/weights/NAME` to train on, `.../sampler_weights/NAME` to
sample with."""

import re
from typing import NamedTuple

from flotilla_tinker.wire.wire_error import WireError

TRAINING, SAMPLER = "weights", "sampler_weights"
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
_PATH = re.compile(rf"tinker://([A-Za-z0-9:._-]{{1,256}})/({TRAINING}|{SAMPLER})/({_NAME})")


class CheckpointPath(NamedTuple):
    """Parts of a path; `kind` is `weights` or `sampler_weights`."""

    model_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def read_path(path: str) -> CheckpointPath:
    """Split a path. Raises WireError."""
    if not (match := _PATH.fullmatch(path)):
        raise WireError(
            f"{path!r} is no path of a checkpoint, as in tinker://MODEL/{TRAINING}/NAME or"
            f" tinker://MODEL/{SAMPLER}/NAME"
        )
    return CheckpointPath(match[1], match[2], match[3])


def check_name(name: str) -> str:
    """Return the name of a checkpoint, which is part of a path. Raises WireError."""
    if not re.fullmatch(_NAME, name):
        raise WireError(
            f"path: {name!r} is no name of a checkpoint: up to 128 of A-Z a-z 0-9 . _ -, not a dot"
            " first"
        )
    return name
