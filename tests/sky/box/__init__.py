"""A throw-away Slurm cluster of several nodes on one machine."""

from tests.sky.box.cluster import Box, BoxError
from tests.sky.box.layout import Layout

__all__ = ["Box", "BoxError", "Layout"]
