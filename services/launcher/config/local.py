"""`[launcher.local]`: processes of this machine, and who reaches them."""

from typing import Literal

from services.common.config import ConfigModel


class LocalConfig(ConfigModel):
    """A run whose replicas are processes of this machine."""

    # `loopback`: nobody beyond this machine reaches the run. `private`: further machines of a
    # replica do (`learner.rank.nodes` above 1), in a network without strangers. The run's services
    # speak TLS then, and those that may have such machines listen at this machine's own address:
    # FLOTILLA_ADDRESS, or else the one of its default route.
    network: Literal["loopback", "private"] = "loopback"
