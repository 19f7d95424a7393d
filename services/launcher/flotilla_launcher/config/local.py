"""`[launcher.local]`: processes on this machine, and the network that reaches them."""

from typing import Literal

from flotilla_common.spec.config import ConfigModel


class LocalConfig(ConfigModel):
    """Settings of a run whose replicas are processes on this machine."""

    # `loopback`: no other machine reaches the run. `private`: further machines of a replica do
    # (`learner.rank.nodes` above 1), over a trusted network. The run's services then use TLS, and
    # those that may span machines listen on this machine's own address: FLOTILLA_ADDRESS, else the
    # address of its default route.
    network: Literal["loopback", "private"] = "loopback"
