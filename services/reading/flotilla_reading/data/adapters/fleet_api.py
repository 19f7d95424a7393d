"""Tasks that Fleet has for an account, from its API. Fleet numbers no versions of them: the SHA-256
of what it answered tells two answers apart."""

import json
import os
from typing import Any, cast
from urllib.parse import urlencode

import httpx

from flotilla_common.adapters.bounded_http import shared_ssl_context
from flotilla_common.text.redaction import add_secret, redact
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.sources import Fetched, SourceFile

KEY_VARIABLE = "FLEET_API_KEY"
# Fleet's SDK reads the same one.
URL_VARIABLE = "FLEET_BASE_URL"
URL = "https://orchestrator.fleetai.com"
_TIMEOUT_S = 300.0
_MOST_BYTES = 2**30
_TRIES = 3


def fetch_fleet_tasks(envs: str) -> Fetched:
    """Return the tasks of some environments, separated by commas, or of all, as Fleet sends them.
    Raises DataError."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise DataError(f"fleet: {KEY_VARIABLE} is not set: it holds the API key of the account")
    add_secret(key)
    url = os.environ.get(URL_VARIABLE) or URL
    if not url.startswith(("http://", "https://")):
        raise DataError(f"{URL_VARIABLE}: {url!r} is no address: write http:// or https://")
    names = [name.strip() for name in envs.split(",") if name.strip()]
    transport = httpx.HTTPTransport(retries=_TRIES, verify=shared_ssl_context())
    with httpx.Client(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        timeout=_TIMEOUT_S,
        transport=transport,
    ) as http:
        given = [task for env in names or [""] for task in _fetch_tasks(http, env)]
    data = "".join(f"{json.dumps(task)}\n" for task in given).encode()
    name = f"fleet:{','.join(names)}"
    query = f"?{urlencode([('env_key', env) for env in names])}" if names else ""
    return Fetched("fleet", f"{url.rstrip('/')}/v1/tasks{query}", [SourceFile(name, data)])


def _fetch_tasks(http: httpx.Client, env: str) -> list[dict[str, Any]]:
    params = {"env_key": env} if env else {}
    where = f"{str(http.base_url).rstrip('/')}/v1/tasks"
    try:
        with http.stream("GET", "/v1/tasks", params=params) as answer:
            if answer.is_error:
                hint = f"; check {KEY_VARIABLE}" if answer.status_code in (401, 403) else ""
                raise DataError(f"{where}: HTTP {answer.status_code} {answer.reason_phrase}{hint}")
            content = json.loads(_read_bounded(answer))
    except (httpx.HTTPError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: {redact(str(error) or type(error).__name__)}") from error
    tasks: Any = cast("dict[str, Any]", content).get("tasks") if isinstance(content, dict) else None
    if not isinstance(tasks, list) or not all(isinstance(each, dict) for each in tasks):
        raise DataError(f'{where}: expected an object with the list "tasks"')
    return tasks


def _read_bounded(answer: httpx.Response) -> bytes:
    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes; name some environments: fleet:ENV")
    return bytes(content)
