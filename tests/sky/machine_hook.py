"""On a machine of the emulated cloud: directs SkyPilot's runtime, which stops idle machines, there.

Copied into the machine's runtime and imported when Python starts, because the address of the real
cloud is fixed in SkyPilot's code.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_ENDPOINT = Path("/etc/flotilla-cloud")
_MODULE = "sky.provision.lambda_cloud.lambda_utils"


class _Redirected(Loader):
    def __init__(self, loader: Loader, endpoint: str) -> None:
        self._loader = loader
        self._endpoint = endpoint

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module.API_ENDPOINT = self._endpoint


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Redirected(spec.loader, _ENDPOINT.read_text())
        return spec


if _ENDPOINT.exists():
    sys.meta_path.insert(0, _Finder())
