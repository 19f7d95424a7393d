"""Probe of the Tinker service of a run: one request for what it offers, within seconds.

Plain HTTP: Tinker's own client would repeat the request for minutes, and a launcher may not have
it."""

import httpx
from pydantic import BaseModel

from flotilla_common.adapters.bounded_http import ask, object_of, open_client
from flotilla_common.spec.spec import TINKER_URL
from flotilla_launcher.backends.sky.cost_estimate import list_idle_gpus
from flotilla_launcher.config.tinker_rules import ENGINE, KEY_VARIABLE, LIMITS
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

# As `tinker.lib.base_url`.
HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
# Of the keys that Tinker's client takes: the second is that of a JWT.
_KEY_STARTS = ("tml-", "eyJ")
_REQUEST_S = 8.0
_MODELS_SHOWN = 20


class _OfferedModel(BaseModel):
    """A model that a service offers; what is absent is not told."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class _ServiceOffer(BaseModel):
    """What a service tells of itself."""

    supported_models: list[_OfferedModel]


async def probe_tinker(context: RunContext) -> list[Finding]:
    """Check that the service answers, takes the key, and trains and samples the base model."""
    if not context.plan.uses_tinker:
        raise NotApplicableError(f"without {ENGINE} there is no Tinker service")
    at = context.shared.policy.tinker.url or context.environ.get(TINKER_URL)
    url = (at or HOSTED_URL).rstrip("/")
    return [
        _check_model(context, url, await _list_models(context, url)),
        *(warn(text, "leave accelerators out") for text in list_idle_gpus(context.plan)),
        *(ok(f"limit: {limit}") for limit in LIMITS),
    ]


async def _list_models(context: RunContext, url: str) -> list[_OfferedModel]:
    """Return the models that the service offers. Raises FindingError."""
    key = context.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise FindingError(fail, f"{KEY_VARIABLE} is not set", f"export {KEY_VARIABLE}")
    if not key.startswith(_KEY_STARTS):
        what = f"{KEY_VARIABLE} does not begin with {_KEY_STARTS[0]}, so Tinker's client refuses it"
        raise FindingError(fail, what, f"export {KEY_VARIABLE} again")
    try:
        async with open_client(key, _REQUEST_S, headers={"X-API-Key": key}) as http:
            answer = await ask(
                http, "GET", f"{url}/api/v1/get_server_capabilities", whole_s=_REQUEST_S
            )
        if answer.status_code == 200:
            return _ServiceOffer.model_validate(await object_of(answer)).supported_models
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        what = f"{url} cannot be reached: {str(error) or type(error).__name__}"
        raise FindingError(fail, what, "correct policy.tinker.url, or start the service") from error
    except ValueError as error:
        what = f"{url} does not answer as a Tinker service: {first_line(str(error))}"
        raise FindingError(fail, what, "correct policy.tinker.url") from error
    raise _explain_refusal(url, answer)


def _explain_refusal(url: str, answer: httpx.Response) -> FindingError:
    """Return what an answer other than 200 says, and what to do about it."""
    status = answer.status_code
    if status in (401, 403):
        what = f"{url} refuses the key in {KEY_VARIABLE} ({status})"
        return FindingError(fail, what, f"export {KEY_VARIABLE} again")
    if status == 402:
        what = f"{url} has no credit left for the account of {KEY_VARIABLE}"
        return FindingError(fail, what, "add credit to it")
    what = f"{url} answered {status}: {first_line(answer.text[:1000], 100)}"
    if status == 429 or status >= 500:
        return FindingError(warn, what, "a run waits for it, for policy.tinker.patience_s at most")
    return FindingError(fail, what, "correct policy.tinker.url")


def _check_model(context: RunContext, url: str, models: list[_OfferedModel]) -> Finding:
    """Check that the base model is among them, and takes sequences of the run's length."""
    policy = context.shared.policy
    name = policy.tinker.model or policy.model
    there = {model.model_name or "": model for model in models}
    found = there.get(name)
    if found is None:
        shown = ", ".join(sorted(there)[:_MODELS_SHOWN]) or "no model"
        what = f"{url} has no model {name}, but {shown}"
        return fail(what, "set policy.tinker.model to the base model's name there")
    able = {"trainable": found.trainable, "sampleable": found.sampleable}
    if unable := [what for what, can in able.items() if can is False]:
        return fail(f"{name} is not {' and not '.join(unable)} at {url}", "choose another model")
    longest = found.max_context_length
    if longest is not None and longest < policy.max_model_len:
        what = f"{name} takes {longest} tokens at {url}, policy.max_model_len is"
        return fail(f"{what} {policy.max_model_len}", f"lower it to {longest}")
    return ok(f"{url} takes the key, and trains {name}")
