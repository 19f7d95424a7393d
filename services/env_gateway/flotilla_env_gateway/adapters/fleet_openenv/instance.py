"""One instance of FleetTaskEnv, through the worker process that holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from flotilla_common.text.parsing import ParseError, TextLimits, parse_json_aside
from flotilla_env_gateway.adapters.fleet.api import FleetApi
from flotilla_env_gateway.adapters.fleet_openenv.codec import parse_parts, parse_tools
from flotilla_env_gateway.adapters.fleet_openenv.worker_process import FleetTaskEnvProcess
from flotilla_env_gateway.large_values import run_aside_for
from flotilla_env_gateway.ports import (
    BAD_TASK,
    BackendError,
    CallResult,
    Execution,
    Instance,
    Part,
    ProvisionRequest,
    Submission,
    Tool,
)
from flotilla_env_gateway.verify.check_report import split_report

_CLOSE_S = 5.0
_CHECK_S = 5.0
# Errors of Fleet's SDK for requests that can never succeed.
_UNKNOWN = ("FleetEnvironmentNotFoundError", "FleetVersionNotFoundError")
_INVALID = (
    *_UNKNOWN,
    "FleetAuthenticationError",
    "FleetBadRequestError",
    "FleetEnvironmentAccessError",
    "FleetPermissionError",
    "FleetRegionError",
    "ImportError",
    "ModuleNotFoundError",
)
# The default limit of a transcript, and some slack.
_CONVERSATION = TextLimits(bytes=2**25, values=2**18)
_NO_SUCH_TOOL = "not found on any active MCP endpoint"


class FleetOpenEnvInstance(Instance):
    """An instance of FleetTaskEnv, lost with its process, which alone holds the state."""

    no_database = "FleetTaskEnv shows no database, and verifies at Fleet"
    regrades = False

    def __init__(
        self,
        api: FleetApi,
        worker: FleetTaskEnvProcess,
        created: Mapping[str, Any],
        request: ProvisionRequest,
    ) -> None:
        self.instance_id: str = created["instance_id"]
        self.env_version: str = created["env_version"]
        self.data_version: str = created["data_version"]
        self.pid = worker.pid
        self._api = api
        self._worker = worker
        self._tag = request.episode_id
        self._leases_browser = request.task.modality == "browser_use"
        self._first: Mapping[str, Any] | None = None

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        first = await self._read_first_observation(timeout_s)
        return await run_aside_for(first, lambda: parse_tools(first))

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        first = await self._read_first_observation(timeout_s)
        shown = first.get("initial_screenshot")
        return await run_aside_for(shown, lambda: parse_parts(shown)) if shown else ()

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        try:
            return await self._step_tool(name, arguments, timeout_s)
        except BackendError as error:
            # FleetTaskEnv does not distinguish an ended instance from one that only fails.
            if error.delivered is None and (why := await self._find_end_reason()):
                raise BackendError("lost", why, delivered=False, lost=True) from error
            raise

    async def grade_submission(
        self, submission: Submission, *, timeout_s: float
    ) -> Execution | None:
        try:
            conversation = await parse_json_aside(submission.conversation or "null", _CONVERSATION)
        except ParseError as error:
            return Execution(error=f"the transcript cannot be read: {error}")
        message = {
            "op": "grade",
            "answer": submission.final_answer,
            "conversation": conversation,
        }
        try:
            answer = check_answer(await self._worker.send_request(message, timeout_s=timeout_s))
        except BackendError as error:
            if error.is_refusal:
                raise
            timed_out = error.kind == "timeout"
            return Execution(error=str(error), timed_out=timed_out, instance_lost=error.lost)
        return await self._to_execution(answer)

    async def close(self, *, timeout_s: float) -> None:
        """Delete all instances with the tag: FleetTaskEnv repeats a creation with an unknown
        outcome."""
        if self._leases_browser and self._first is not None:
            await self._release_browser()
        await self._worker.kill()
        await self._api.delete_run_instances(self._tag, timeout_s=timeout_s)

    async def _step_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> CallResult:
        message = {"op": "step", "tool": name, "params": arguments}
        answer = check_answer(await self._worker.send_request(message, timeout_s=timeout_s))
        info = answer["info"]
        if "tool_result" in info:
            error = info.get("tool_error")
            parts = await run_aside_for(info, lambda: parse_parts(info["tool_result"]))
            return CallResult(parts, error is not None, done=answer["done"])
        tool_error = str(info.get("tool_error"))
        unknown = _NO_SUCH_TOOL in tool_error
        raise BackendError(
            "fleet_task_env", tool_error, delivered=False if unknown else None, invalid=unknown
        )

    async def _to_execution(self, answer: Mapping[str, Any]) -> Execution:
        """Return what FleetTaskEnv made of the submission."""
        stdout = answer["stdout"] or ""
        score, report, rewards = split_report(answer["returned"])
        known = Execution(answer["reward"], report, stdout, rewards=rewards)
        if known.result is not None:
            return known
        why = await self._find_end_reason()
        if why is None and score is not None:
            # FleetTaskEnv gave no reward, though the verifier returned a score.
            return replace(known, result=score)
        error = why or answer["verifier_error"] or "no reward"
        return Execution(error=error, stdout=stdout, instance_lost=why is not None)

    async def _find_end_reason(self) -> str | None:
        """Return why the instance is certainly gone; None if it runs, or that is unknown."""
        try:
            return await self._api.find_end_reason(self.instance_id, _CHECK_S)
        except BackendError:
            return None

    async def _release_browser(self) -> None:
        try:
            await self._worker.send_request({"op": "close"}, timeout_s=_CLOSE_S)
        except BackendError:
            # The lease expires anyway; the instance must not wait for it.
            return

    async def _read_first_observation(self, timeout_s: float) -> Mapping[str, Any]:
        if self._first is None:
            answer = check_answer(await self._worker.read_answer(timeout_s=timeout_s))
            self._first = cast("Mapping[str, Any]", answer["observation"])
        return self._first


def check_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Raise BackendError for an error of FleetTaskEnv. The process continues."""
    if "kind" not in answer:
        return answer
    message = f"{answer['kind']}: {answer['error']}"
    kind = BAD_TASK if answer["kind"] in _UNKNOWN else "fleet_task_env"
    raise BackendError(kind, message, delivered=None, invalid=answer["kind"] in _INVALID)
