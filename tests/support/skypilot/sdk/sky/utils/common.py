"""The required certainty of a status."""

from enum import Enum


class StatusRefreshMode(Enum):
    """FORCE queries the clouds."""

    FORCE = "force"
