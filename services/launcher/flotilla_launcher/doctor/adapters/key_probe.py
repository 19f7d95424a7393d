"""Probes of the keys for Fleet, Weights & Biases and Slack: one request each."""

import base64
import netrc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from flotilla_common.adapters.bounded_http import ask, object_of
from flotilla_common.text.parsing import TextLimits
from flotilla_launcher.config.backend_tables import FLEET_BACKENDS
from flotilla_launcher.doctor.dataset import EnvVersion
from flotilla_launcher.doctor.findings import (
    Finding,
    NotApplicableError,
    fail,
    first_line,
    ok,
    warn,
)
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.doctor.tcp_ports import used_backends
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT

_REQUEST_S = 8.0
# Fleet lists tasks with their verifiers.
_ANSWERS = TextLimits(bytes=2**26, values=2**20)
_WANDB_URL = "https://api.wandb.ai"
_VIEWER = "query Viewer { viewer { username teams { edges { node { name } } } } }"
_SLACK_SCOPE = "chat:write"
_SLACK_FIXES = {
    "invalid_auth": "make a new bot token and export it",
    "not_authed": "export the bot token (xoxb-...)",
    "token_revoked": "the app was uninstalled: install it again, and export the new token",
    "account_inactive": "the bot was deactivated: install the app again",
}


class _RefusedError(Exception):
    """Raised when an answer cannot be used; the message gives the reason."""


async def probe_fleet(context: RunContext) -> list[Finding]:
    url, variable, key = _fleet_access(context)
    if not key:
        return [fail(f"{variable} is not set", f"export {variable}, or correct api_key_env")]
    async with _make_client(key) as http:
        try:
            answer = await _request(http, "GET", f"{url}/v1/account")
        except httpx.HTTPError as error:
            fix = "correct the backend's url, or check that this machine reaches it"
            return [fail(f"{url} cannot be reached: {_error_text(error)}", fix)]
    if answer.status_code in (401, 403):
        what = f"{url} refuses the key in {variable} ({answer.status_code})"
        return [fail(what, f"export {variable} again, from Fleet's dashboard")]
    if answer.status_code != 200:
        what = f"{url}/v1/account answered {answer.status_code}: {first_line(answer.text, 100)}"
        return [fail(what, "check that the backend's url is Fleet's control plane")]
    return await _judge_account(answer, url, context)


async def _judge_account(answer: httpx.Response, url: str, context: RunContext) -> list[Finding]:
    body = await _json_object(answer)
    limit, used = body.get("instance_limit"), body.get("instance_count", 0)
    known = ok(f"{url} knows the key, of {body.get('team_name') or 'a team without a name'}")
    rollout = context.sections.get(ROLLOUT)
    if rollout is None or not isinstance(limit, int) or not isinstance(used, int):
        return [known]
    wanted = rollout["max_attempts"] * context.plan.config.replica_counts()[ROLLOUT]
    if wanted <= limit - used:
        return [known]
    what = f"{wanted} attempts at once, but Fleet allows {limit} instances, {used} of them in use"
    return [known, warn(what, "lower rollout.max_attempts, or end other uses of instances")]


def _fleet_access(context: RunContext) -> tuple[str, str, str]:
    """Return Fleet's URL, the variable of the key, and the key. Raises NotApplicableError."""
    section = context.get_section(GATEWAY)
    used = [name for name in FLEET_BACKENDS if name in used_backends(context)]
    if not used:
        raise NotApplicableError("no environment is Fleet's")
    config = section["backends"][used[0]]
    if config["command"]:
        raise NotApplicableError("the gateway starts an emulator of Fleet, which takes any key")
    variable = config["api_key_env"] or "FLEET_API_KEY"
    return config["url"].rstrip("/"), variable, context.environ.get(variable, "").strip()


async def check_fleet_versions(
    context: RunContext, versions: Sequence[EnvVersion]
) -> list[Finding]:
    """Check that Fleet has these environments, in these versions, with this data."""
    url, variable, key = _fleet_access(context)
    if not key:
        raise NotApplicableError(f"{variable} is not set")
    findings: list[Finding] = []
    async with _make_client(key) as http:
        for env_key in sorted({version.env_key for version in versions}):
            wanted = [version for version in versions if version.env_key == env_key]
            try:
                findings += await _check_environment(http, url, env_key, wanted)
            except (httpx.HTTPError, _RefusedError) as error:
                fix = "see the probe `fleet`"
                findings.append(
                    fail(f"Fleet does not answer for {env_key}: {_error_text(error)}", fix)
                )
    return findings or [ok("Fleet has their environments, versions and data")]


async def _check_environment(
    http: httpx.AsyncClient, url: str, env_key: str, wanted: Sequence[EnvVersion]
) -> list[Finding]:
    answer = await _request(http, "GET", f"{url}/v1/env/{quote(env_key, safe='')}")
    if answer.status_code in (400, 404):
        fix = "correct env_id in the task file, or request access to that environment from Fleet"
        return [fail(f"Fleet has no environment {env_key}", fix)]
    have = (await _json_object(answer)).get("versions") or {}
    findings: list[Finding] = []
    for version in sorted({w.env_version for w in wanted} - {""}):
        if version not in have and f"v{version}" not in have:
            what = f"Fleet has no version {version} of {env_key}, but {', '.join(sorted(have))}"
            findings.append(fail(what, "correct `version` in the task file"))
    data = sorted({w.data_version for w in wanted} - {""})
    return [*findings, *[f for v in data for f in await _check_data(http, url, env_key, v)]]


async def _check_data(
    http: httpx.AsyncClient, url: str, env_key: str, data_version: str
) -> list[Finding]:
    """Check a data version. Fleet lists data only through the team's tasks; without tasks it is
    unknown."""
    query = {"env_key": env_key, "data_version": data_version}
    here = await _json_object(await _request(http, "GET", f"{url}/v1/tasks", params=query))
    if here.get("tasks"):
        return []
    query = {"env_key": env_key}
    every = await _json_object(await _request(http, "GET", f"{url}/v1/tasks", params=query))
    known = sorted({str(t.get("data_version") or "") for t in every.get("tasks") or ()} - {""})
    what = f"Fleet lists no task of {env_key}@{data_version}"
    if known:
        return [fail(f"{what}, but of {', '.join(known)}", "correct data_version in the task file")]
    return [warn(what, "see the probe `episodes`, which opens one")]


async def probe_wandb(context: RunContext) -> list[Finding]:
    tracking = context.get_section(LEARNER)["tracking"]
    if "wandb" not in tracking["backends"]:
        raise NotApplicableError("learner.tracking.backends does not name wandb")
    if tracking["mode"] == "offline" or context.environ.get("WANDB_MODE") == "offline":
        raise NotApplicableError("wandb is offline by configuration")
    judge = fail if tracking["mode"] == "online" else warn
    url = context.environ.get("WANDB_BASE_URL", _WANDB_URL).rstrip("/")
    key = context.environ.get("WANDB_API_KEY", "").strip() or _read_netrc_key(url, context.environ)
    if not key:
        return [judge("no key of wandb: the run would go offline", "export WANDB_API_KEY")]
    try:
        viewer = await _fetch_viewer(url, key)
    except httpx.HTTPError as error:
        return [judge(f"{url} cannot be reached: {_error_text(error)}", "correct WANDB_BASE_URL")]
    except _RefusedError as error:
        # A refused key stops the run in any mode.
        return [fail(str(error), f"export WANDB_API_KEY again, from {url}/authorize")]
    return _judge_viewer(viewer, tracking["entity"])


async def _fetch_viewer(url: str, key: str) -> Mapping[str, Any]:
    """Return the user that the key belongs to. Raises httpx.HTTPError, _RefusedError."""
    login = base64.b64encode(f"api:{key}".encode()).decode()
    async with _make_client() as http:
        headers = {"Authorization": f"Basic {login}"}
        query = {"query": _VIEWER}
        answer = await _request(http, "POST", f"{url}/graphql", json=query, headers=headers)
    if answer.status_code in (401, 403):
        raise _RefusedError(f"{url} refuses the key of wandb ({answer.status_code})")
    viewer = ((await _json_object(answer)).get("data") or {}).get("viewer")
    if not viewer:
        raise _RefusedError(f"{url} does not know the key of wandb")
    return viewer


def _judge_viewer(viewer: Mapping[str, Any], entity: str | None) -> list[Finding]:
    name = str(viewer.get("username"))
    edges = (viewer.get("teams") or {}).get("edges") or ()
    teams = {str(edge["node"]["name"]) for edge in edges}
    if entity is not None and teams and entity not in {name, *teams}:
        what = f"{name} is not in learner.tracking.entity {entity}, but in {', '.join(teams)}"
        return [fail(what, "correct entity, or use a key of that team")]
    return [ok(f"wandb knows the key, of {name}")]


def _read_netrc_key(url: str, environ: Mapping[str, str]) -> str:
    """Read the key that `wandb login` left; "" if there is none."""
    path = environ.get("NETRC") or Path("~/.netrc").expanduser()
    try:
        found = netrc.netrc(path).authenticators(urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return ""
    return found[2] or "" if found else ""


async def probe_slack(context: RunContext) -> list[Finding]:
    notify = context.plan.config.notify
    if notify.slack.channel is None or notify.disable_slack:
        raise NotApplicableError("no message goes to Slack")
    variable = notify.slack.token_env
    token = context.environ.get(variable, "").strip()
    if not token:
        fix = f"export {variable}, or set launcher.notify.disable_slack"
        return [fail(f"{variable} is not set", fix)]
    url = f"{notify.slack.api_url.rstrip('/')}/auth.test"
    async with _make_client(token) as http:
        try:
            answer = await _request(http, "POST", url)
            body = await _json_object(answer)
        except (httpx.HTTPError, _RefusedError) as error:
            fix = "correct launcher.notify.slack.api_url, or check that this machine reaches Slack"
            return [fail(f"{url} gave no answer: {_error_text(error)}", fix)]
    if not body.get("ok"):
        reason = str(body.get("error"))
        fix = _SLACK_FIXES.get(reason, "see https://api.slack.com/methods/auth.test")
        return [fail(f"Slack refuses the token in {variable}: {reason}", fix)]
    scopes = [scope.strip() for scope in answer.headers.get("x-oauth-scopes", "").split(",")]
    if scopes != [""] and _SLACK_SCOPE not in scopes:
        what = f"the token in {variable} may not post: it lacks the scope {_SLACK_SCOPE}"
        return [fail(what, "add the scope to the app, install it again, export the new token")]
    return [ok(f"Slack knows the token, of {body.get('user')} in {body.get('team')}")]


def _make_client(bearer: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    return httpx.AsyncClient(timeout=_REQUEST_S, headers=headers)


async def _request(
    http: httpx.AsyncClient, method: str, url: str, **request: Any
) -> httpx.Response:
    return await ask(http, method, url, limits=_ANSWERS, **request)


async def _json_object(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a 200. Raises _RefusedError."""
    try:
        if answer.status_code == 200:
            return await object_of(answer, _ANSWERS)
    except ValueError:
        pass
    text = first_line(answer.text[:1000], 100)
    raise _RefusedError(f"{answer.url.host} answered {answer.status_code}: {text}")


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
