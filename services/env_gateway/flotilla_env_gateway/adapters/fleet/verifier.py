"""Remote runs of a task's verifier at Fleet, beside the instance."""

import base64
import hashlib
import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.text.parsing import as_object
from flotilla_env_gateway.adapters.fleet.api import FleetApi
from flotilla_env_gateway.adapters.fleet.errors import NotFoundError
from flotilla_env_gateway.ports import Execution, Submission
from flotilla_env_gateway.verify.check_report import split_report
from flotilla_env_gateway.verify.verifier_finder import VerifierFinder
from flotilla_env_gateway.verify.verifier_source import VerifierError, VerifierFunction

_DEFAULT_REGION = "us-west-1"
_KNOWN_KEPT = 4096
_MAX_TIMEOUT_S = 300
# Fleet ends the verifier itself, and reports it, before the request times out.
_TIMEOUT_SHARE = 0.9
# ZIP's earliest date: equal sources make equal bundles, so Fleet needs each only once.
_EPOCH = (1980, 1, 1, 0, 0, 0)
# The SDK pickles with cloudpickle at this protocol; plain values give the same bytes either way.
_PICKLE_PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class VerifierBundle:
    sha256: str
    content: bytes


@lru_cache(maxsize=256)
def make_bundle(source: str) -> VerifierBundle:
    """Build the ZIP file from which Fleet runs a verifier."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("requirements.txt", "fleet-python"), ("verifier.py", source)):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, text)
    content = buffer.getvalue()
    return VerifierBundle(hashlib.sha256(content).hexdigest(), content)


def encode_arguments(instance_id: str, keywords: Mapping[str, Any]) -> str:
    """Pickle the call's arguments as Fleet expects them: a placeholder for `env`, then its id."""
    arguments = {"args": (None, {"env": instance_id}), "kwargs": dict(keywords)}
    return base64.b64encode(pickle.dumps(arguments, protocol=_PICKLE_PROTOCOL)).decode()


class FleetVerifier:
    def __init__(self, api: FleetApi, region: str | None) -> None:
        self._api = api
        self._region = region or _DEFAULT_REGION
        self._finder = VerifierFinder()
        self._uploaded: BoundedDict[str, None] = BoundedDict(_KNOWN_KEPT)

    async def run_verifier(
        self, instance_id: str, submission: Submission, timeout_s: float
    ) -> Execution:
        """Run a task's verifier. Raises BackendError if Fleet refuses, or does not report the
        outcome."""
        source = submission.task.verifier
        assert source is not None, "a task without a verifier is not sent to Fleet"
        try:
            function = await self._finder.find_function(source)
        except VerifierError as error:
            return Execution(error=f"of task {submission.task.key!r}, {error}")
        request = _build_request(instance_id, submission, function, make_bundle(source), timeout_s)
        return parse_execution(await self._execute_bundle(request, make_bundle(source), timeout_s))

    async def _execute_bundle(
        self, request: dict[str, Any], bundle: VerifierBundle, timeout_s: float
    ) -> Any:
        until = loop_time() + timeout_s
        request["region"] = self._region
        if await self._is_uploaded(bundle, timeout_s):
            try:
                return await self._post_request(request, until)
            except NotFoundError:
                # Fleet has dropped the bundle meanwhile.
                self._uploaded.pop(bundle.sha256, None)
        request["bundle"] = base64.b64encode(bundle.content).decode()
        answer = await self._post_request(request, until)
        self._uploaded[bundle.sha256] = None
        return answer

    async def _post_request(self, request: Mapping[str, Any], until: float) -> Any:
        left_s = seconds_left(until)
        return await self._api.call_control_plane(
            "POST", "/v1/verifiers/execute", timeout_s=left_s, body=request
        )

    async def _is_uploaded(self, bundle: VerifierBundle, timeout_s: float) -> bool:
        if bundle.sha256 in self._uploaded:
            self._uploaded[bundle.sha256] = None
            return True
        path = f"/v1/verifiers/check?sha256={bundle.sha256}"
        try:
            answer = await self._api.call_control_plane("GET", path, timeout_s=timeout_s)
        except NotFoundError:
            return False
        known = as_object(answer).get("success") is True
        if known:
            self._uploaded[bundle.sha256] = None
        return known


def parse_execution(answer: Any) -> Execution:
    """Parse Fleet's report of a verifier's run. A run that failed may succeed another time."""
    if not isinstance(answer, dict):
        return Execution(error="Fleet described a verifier's run by no object", retryable=True)
    fields = cast("dict[str, Any]", answer)
    stdout = str(fields.get("stdout") or "")
    if fields.get("success") is True:
        score, report, rewards = split_report(fields.get("result"))
        return Execution(result=score, report=report, stdout=stdout, rewards=rewards)
    error = fields.get("error")
    details = as_object(error) or {"message": error}
    kind, message = (
        details.get("type"),
        details.get("message") or "the verifier did not run to its end",
    )
    return Execution(
        stdout=stdout,
        error=f"{kind}: {message}" if kind else str(message),
        timed_out=kind == "TimeoutError",
        retryable=True,
    )


def _build_request(
    instance_id: str,
    submission: Submission,
    function: VerifierFunction,
    bundle: VerifierBundle,
    timeout_s: float,
) -> dict[str, Any]:
    keywords = function.choose_arguments(
        submission.final_answer, submission.conversation, submission.task.metadata
    )
    return {
        "key": submission.task.key,
        "sha256": bundle.sha256,
        "args": encode_arguments(instance_id, keywords),
        "args_array": [{"env": instance_id}],
        "function_name": function.name,
        "timeout": max(1, min(_MAX_TIMEOUT_S, int(timeout_s * _TIMEOUT_SHARE))),
    }
