"""A plugin of SkyPilot's API server that turns its fixed internet address to this machine.

`plugins.yaml` is SkyPilot's own extension point: nothing of the installed package is edited.
"""

from importlib import import_module
from typing import Any

_plugins: Any = import_module("sky.server.plugins")


class OfflinePlugin(_plugins.BasePlugin):
    """Loaded by every process of the API server."""

    def __init__(self, lambda_endpoint: str) -> None:
        self._lambda_endpoint = lambda_endpoint

    @property
    def name(self) -> str:
        return "flotilla-offline"

    def install(self, extension_context: Any) -> None:
        provider: Any = import_module("sky.provision.lambda_cloud.lambda_utils")
        provider.API_ENDPOINT = self._lambda_endpoint
