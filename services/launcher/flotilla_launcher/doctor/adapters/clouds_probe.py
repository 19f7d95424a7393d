"""Probe of the clouds that SkyPilot's API server may use. Runs in the launcher's environment."""

import importlib
from collections.abc import Mapping
from typing import Any

from flotilla_launcher.doctor.findings import Finding, fail, first_line, ok, warn
from flotilla_launcher.doctor.probe_process import answer_question

_ENDPOINT_VARIABLE = "SKYPILOT_API_SERVER_ENDPOINT"
_SERVER_FIX = (
    f"start it (`sky api start`), or name one that runs in {_ENDPOINT_VARIABLE} or by"
    " `sky api login -e URL`"
)
_HEALTH_S = 5.0


def probe_sky(question: Mapping[str, Any]) -> list[Finding]:
    try:
        # `sky.check` is this function or the module of that name, whatever was imported last.
        sdk: Any = importlib.import_module("sky.client.sdk")
        server: Any = importlib.import_module("sky.server.common")
        errors: Any = importlib.import_module("sky.exceptions")
    except ImportError as error:
        return [fail(f"SkyPilot is not installed here ({error})", "make sky")]
    # Checked first without the SDK, which starts a server if none answers.
    if unreachable := _check_server(server, errors.ServerTemporarilyUnavailableError):
        return [unreachable]
    try:
        # `check` checks each cloud again; `enabled_clouds` would return cached results.
        enabled = sdk.get(sdk.check(None, verbose=False))
    # The SDK and the server raise many types; the finding names the command that shows more.
    except Exception as error:  # noqa: BLE001
        return [fail(f"sky check failed: {first_line(str(error))}", "see `sky check`")]
    return judge_clouds(question["wanted"], _compute_clouds(enabled))


def _check_server(server: Any, unavailable: type[Exception]) -> Finding | None:
    """Return a finding if the API server that SkyPilot's configuration names does not answer."""
    try:
        health = server.make_authenticated_request(
            "GET", "/api/health", retry=False, timeout=_HEALTH_S
        )
        wrong = "" if health.ok else f"{health.status_code} {health.reason}"
    except (OSError, ValueError, unavailable) as error:
        wrong = first_line(str(error)) or type(error).__name__
    if not wrong:
        return None
    endpoint = server.redact_url_password(server.get_server_url())
    return fail(f"SkyPilot's API server does not answer at {endpoint}: {wrong}", _SERVER_FIX)


def _compute_clouds(enabled: Any) -> set[str]:
    """Return the clouds that can compute, from {workspace: {cloud: [capability, ...]}}."""
    return {
        cloud.lower()
        for clouds in enabled.values()
        for cloud, capabilities in clouds.items()
        if "compute" in [str(capability).lower() for capability in capabilities]
    }


def judge_clouds(wanted: Mapping[str, list[str | None]], enabled: set[str]) -> list[Finding]:
    """Compare wanted and enabled clouds. `wanted` holds the infra of each service's candidates;
    None stands for any cloud."""
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
    answer_question(probe_sky)
