"""A plugin of SkyPilot's API server that turns its few fixed internet addresses to this machine.

`plugins.yaml` is SkyPilot's own extension point: nothing of the installed package is edited.
"""

from importlib import import_module
from typing import Any

_plugins: Any = import_module("sky.server.plugins")


class OfflinePlugin(_plugins.BasePlugin):
    """Loaded by every process of the API server."""

    def __init__(self, probe_url: str, lambda_endpoint: str) -> None:
        self._probe_url = probe_url
        self._lambda_endpoint = lambda_endpoint

    @property
    def name(self) -> str:
        return "flotilla-offline"

    def install(self, extension_context: Any) -> None:
        # Controllers of managed jobs judge no job while 8.8.8.8 and 1.1.1.1 do not answer.
        network: Any = import_module("sky.backends.backend_utils")
        network._TEST_IP_LIST = [self._probe_url]
        provider: Any = import_module("sky.provision.lambda_cloud.lambda_utils")
        provider.API_ENDPOINT = self._lambda_endpoint
        # One of 0.4 GiB for every 2 GiB of memory would be started.
        controllers: Any = import_module("sky.utils.controller_utils")
        controllers.MAX_CONTROLLERS = 1
