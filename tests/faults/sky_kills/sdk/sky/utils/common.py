"""How certain a status is to be."""

from enum import Enum


class StatusRefreshMode(Enum):
    """FORCE asks the clouds."""

    FORCE = "force"
