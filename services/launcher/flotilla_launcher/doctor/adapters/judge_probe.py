"""Probe of the judge of a run's groups: one tiny question, within seconds."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from flotilla_common.adapters.bounded_http import ask, object_of, open_client
from flotilla_common.text.parsing import as_object
from flotilla_launcher.doctor.findings import (
    Finding,
    FindingError,
    NotApplicableError,
    fail,
    first_line,
    ok,
    warn,
)
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import LEARNER, RunMode

_REQUEST_S = 12.0
_WANTED: dict[str, Any] = {"scores": {"A1": 1, "A2": 0}}
_QUESTION = f"Answer with this JSON object and nothing else: {json.dumps(_WANTED)}"


async def probe_judge(context: RunContext) -> list[Finding]:
    """Check that the judge answers, takes the key, has the model, and writes JSON when asked to."""
    judge = as_object(context.sections.get(LEARNER, {}).get("judge"))
    if not judge or context.mode is RunMode.EVAL_ONLY:
        raise NotApplicableError("no groups are judged: there is no [learner.judge]")
    text = await _ask(judge, _read_key(judge, context.environ))
    try:
        obeys = json.loads(text) == _WANTED
    except ValueError:
        obeys = False
    name = f"{judge['model']} at {judge['url']}"
    if not obeys:
        what = f"{name}, asked for a JSON object alone, wrote {first_line(text, 80)!r}"
        return [warn(what, "groups without a verdict have no grades: choose another model")]
    return [ok(f"{name} answers")]


def _read_key(judge: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    variable = str(judge.get("api_key") or "").removeprefix("$")
    if variable and not environ.get(variable):
        what = f"{variable}, which learner.judge.api_key names, is not set"
        raise FindingError(fail, what, f"export {variable}, or leave the key out")
    return environ.get(variable, "") if variable else ""


async def _ask(judge: Mapping[str, Any], key: str) -> str:
    """Return what the judge writes. Raises FindingError."""
    url = f"{judge['url']}/chat/completions"
    body = {
        "model": judge["model"],
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": judge["max_tokens"],
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with open_client(key, _REQUEST_S, headers=headers) as http:
            answer = await ask(http, "POST", url, whole_s=_REQUEST_S, json=body)
        if answer.is_success:
            choice = as_object((await object_of(answer))["choices"][0])
            return str(as_object(choice["message"])["content"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        what = f"{url} cannot be reached: {str(error) or type(error).__name__}"
        raise FindingError(fail, what, "correct learner.judge.url, or start the server") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        what = f"{url} gives no chat completion: {first_line(repr(error))}"
        raise FindingError(fail, what, "correct learner.judge.url") from error
    raise _explain_refusal(url, answer)


def _explain_refusal(url: str, answer: httpx.Response) -> FindingError:
    status = answer.status_code
    what = f"{url} answered {status}: {first_line(answer.text[:1000], 100)}"
    if status == 429 or status >= 500:
        return FindingError(warn, what, "a run waits for it")
    return FindingError(fail, what, "correct learner.judge: its url, model or api_key")
