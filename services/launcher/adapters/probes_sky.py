"""Asks SkyPilot's API server which clouds it may use. Runs in the launcher's environment."""

import importlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from services.launcher.doctor.children import answer
from services.launcher.doctor.results import Finding, fail, first_line, ok, warn

_ENDPOINT_VARIABLE = "SKYPILOT_API_SERVER_ENDPOINT"
_ENDPOINT = "http://127.0.0.1:46580"
_HEALTH_S = 5.0


def probe(question: Mapping[str, Any]) -> list[Finding]:
    try:
        # `sky.check` is this function or the module of that name, whatever was imported last.
        sdk: Any = importlib.import_module("sky.client.sdk")
    except ImportError as error:
        return [fail(f"SkyPilot is not installed here ({error})", "make sky")]
    # First by hand: its SDK starts a server of its own where none answers.
    if unreachable := _unreachable():
        return [unreachable]
    try:
        # `check` looks at each cloud anew; `enabled_clouds` would tell what it remembers.
        enabled = sdk.get(sdk.check(None, verbose=False))
    # Whatever the SDK or the server raise: it is told, with the command that shows more.
    except Exception as error:  # noqa: BLE001
        return [fail(f"sky check failed: {first_line(str(error))}", "see `sky check`")]
    return judge(question["wanted"], _names(enabled))


def _unreachable() -> Finding | None:
    endpoint = os.environ.get(_ENDPOINT_VARIABLE, _ENDPOINT).rstrip("/")
    try:
        with urllib.request.urlopen(f"{endpoint}/api/health", timeout=_HEALTH_S):
            return None
    except (urllib.error.URLError, OSError, ValueError) as error:
        fix = f"start it (`sky api start`), or set {_ENDPOINT_VARIABLE} to one that runs"
        return fail(f"SkyPilot's API server does not answer at {endpoint}: {error}", fix)


def _names(enabled: Any) -> set[str]:
    """Clouds that can compute, from {workspace: {cloud: [capability, ...]}}."""
    return {
        cloud.lower()
        for clouds in enabled.values()
        for cloud, capabilities in clouds.items()
        if "compute" in [str(capability).lower() for capability in capabilities]
    }


def judge(wanted: Mapping[str, list[str | None]], enabled: set[str]) -> list[Finding]:
    """`wanted` has the infra of each service's candidates; None is any cloud."""
    if not enabled:
        return [fail("no cloud is enabled", "give SkyPilot credentials of one; see `sky check`")]
    findings: list[Finding] = []
    for service, infras in wanted.items():
        named = {infra.split("/")[0].lower() for infra in infras if infra}
        missing = sorted(named - enabled)
        if not missing:
            continue
        what = f"{service}: not enabled: {', '.join(missing)}"
        fix = f"see `sky check {' '.join(missing)}`"
        none_left = None not in infras and not named & enabled
        findings.append(fail(what, fix) if none_left else warn(what, fix))
    return findings or [ok(f"enabled: {', '.join(sorted(enabled))}")]


if __name__ == "__main__":
    answer(probe)
