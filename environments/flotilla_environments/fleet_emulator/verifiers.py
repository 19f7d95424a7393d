"""Verifiers: bundles that clients upload, and their execution in separate processes."""

import asyncio
import base64
import binascii
import io
import pickle
import tempfile
import time
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flotilla_environments.api import DATABASES, Instance
from flotilla_environments.fleet_emulator.codec import (
    ExecuteFunction,
    ExecuteVerifier,
    StructuredDiff,
)
from flotilla_environments.fleet_emulator.faults import FaultPlan, VerifierOutcome
from flotilla_environments.fleet_emulator.instance_lookup import FleetLookup
from flotilla_environments.fleet_emulator.request_counters import Counters
from flotilla_environments.fleet_emulator.task_catalogue import TaskStore
from flotilla_environments.fleet_emulator.verifier_pool import Answer, VerifierPool
from flotilla_environments.server.codec import ApiError, instance_body, parse_body
from flotilla_environments.server.instance_runner import PREFIX

MAX_BUNDLES = 1_024
MAX_CODE_BYTES = 2**20
_MEMORY = Path("/dev/shm")
_DIFF = """
from fleet.verifiers.local_executor import diff_dbs

def structured_diff(env, tables, fields, table_fields):
    paths = [env.db(name).db_path for name in ("seed", "current")]
    names = [table.name for table in env.db("current").describe().tables]
    ignored = {name: {*fields, *table_fields.get(name, ())} for name in names}
    return diff_dbs(*paths, set(tables), ignored)
"""


class Verifiers:
    """Routes of verifiers.

    `over_http`: executed verifiers query the instance through the emulator's own routes, as at
    Fleet. Otherwise they get copies of its databases, which takes half the time."""

    def __init__(
        self,
        pool: VerifierPool,
        lookup: FleetLookup,
        tasks: TaskStore,
        plan: FaultPlan,
        counters: Counters,
        *,
        max_seconds: float,
        over_http: bool,
    ) -> None:
        self._pool = pool
        self._lookup = lookup
        self._tasks = tasks
        self._plan = plan
        self._counters = counters
        self._max_seconds = max_seconds
        self._over_http = over_http
        self._bundles: OrderedDict[str, str] = OrderedDict()

    def build_routes(self) -> list[Route]:
        function = f"{PREFIX}/execute_verifier_function"
        return [
            Route("/v1/verifiers/check", self.check_bundle),
            Route("/v1/verifiers/execute", self.execute_verifier, methods=["POST"]),
            Route("/v1/verifiers/{verifier_id}", self.get_verifier),
            Route(function, self.execute_function, methods=["POST"]),
            Route(f"{PREFIX}/diff/structured", self.diff_databases, methods=["POST"]),
        ]

    async def check_bundle(self, request: Request) -> Response:
        return JSONResponse({"success": request.query_params.get("sha256") in self._bundles})

    async def get_verifier(self, request: Request) -> Response:
        verifier = self._tasks.find_verifier(request.path_params["verifier_id"])
        if verifier is None:
            raise ApiError(404, "Verifier not found")
        return JSONResponse(verifier)

    async def execute_verifier(self, request: Request) -> Response:
        body = await parse_body(ExecuteVerifier, request)
        instance_id = body.instance_id()
        code = self._find_code(body)
        started = time.monotonic()
        outcome = self._plan.next_outcome()
        if outcome is not None:
            answer = _injected_answer(outcome)
        else:
            await asyncio.sleep(self._plan.settings.verifier_delay)
            job = {"code": code, "function": body.function_name, "arguments": body.args}
            answer = await self._run_job(request, instance_id, job, body.timeout, self._over_http)
        return JSONResponse(
            {
                **answer,
                "key": body.key,
                "version": 1,
                "verifier_id": f"verifier-{body.key}",
                "execution_id": str(uuid.uuid4()),
                "execution_time_ms": round((time.monotonic() - started) * 1e3),
                "bundle_cache_hit": body.bundle is None,
            }
        )

    async def execute_function(self, request: Request) -> Response:
        """Execute like an instance: without a bundle, and with the instance as the only
        argument."""
        self._lookup.find_running(request)
        body = await parse_body(ExecuteFunction, request)
        job = {"code": body.function_code, "function": body.function_name, "arguments": None}
        instance_id = request.path_params["instance_id"]
        answer = await self._run_job(request, instance_id, job, self._max_seconds, self._over_http)
        error = answer["error"] and f"{answer['error']['type']}: {answer['error']['message']}"
        return JSONResponse(
            {
                "success": answer["success"],
                "result": answer["result"],
                "error": error,
                "message": answer["stdout"] or "executed",
            }
        )

    async def diff_databases(self, request: Request) -> Response:
        """Diff seed and current by the SDK's own differ."""
        self._lookup.find_running(request)
        ignore = (await parse_body(StructuredDiff, request)).ignore_config
        given = {
            "args": (None, ignore.tables, ignore.fields, ignore.table_fields, {}),
            "kwargs": {},
        }
        arguments = base64.b64encode(pickle.dumps(given)).decode()
        job = {"code": _DIFF, "function": "structured_diff", "arguments": arguments}
        instance_id = request.path_params["instance_id"]
        answer = await self._run_job(request, instance_id, job, self._max_seconds, over_http=False)
        if answer["success"]:
            return JSONResponse(answer["result"])
        return JSONResponse({"success": False, "diff": {}, "message": answer["error"]["message"]})

    def _find_code(self, body: ExecuteVerifier) -> str:
        if body.bundle is not None:
            code = _unpack_bundle(body.bundle)
            self._bundles[body.sha256 or ""] = code
            if len(self._bundles) > MAX_BUNDLES:
                self._bundles.popitem(last=False)
            return code
        code = self._bundles.get(body.sha256 or "")
        if code is None:
            raise ApiError(404, f"Bundle not found: {body.sha256}")
        return code

    async def _run_job(
        self,
        request: Request,
        instance_id: str,
        job: dict[str, Any],
        timeout_s: float,
        over_http: bool,
    ) -> Answer:
        record = self._lookup.registry.find_record(instance_id)
        if record is None:
            raise ApiError(404, f"Instance '{instance_id}' not found")
        if record.instance is None:
            message = f"Failed to load instance resources: '{instance_id}' is not running"
            return _failure_answer("FleetEnvironmentError", message)
        base_url = str(request.base_url).rstrip("/")
        job |= {
            "timeout": min(timeout_s, self._max_seconds),
            "instance": instance_body(record, base_url),
            "base_url": base_url,
        }
        with self._counters.verifiers.track_one():
            if over_http:
                return await self._pool.execute_job({**job, "databases": None})
            with _write_snapshots(record.instance) as paths:
                return await self._pool.execute_job({**job, "databases": paths})


@contextmanager
def _write_snapshots(instance: Instance) -> Generator[dict[str, str]]:
    """Write copies of the databases as they are now, and yield their paths."""
    where = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="flotilla-verifier-", dir=where) as folder:
        paths = {name: str(Path(folder, f"{name}.db")) for name in DATABASES}
        for name in DATABASES:
            Path(paths[name]).write_bytes(instance.snapshot(name))
        yield paths


def _unpack_bundle(bundle: str) -> str:
    """Unpack the code of a bundle. Raises `ApiError` 400."""
    try:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(bundle, validate=True))) as archive:
            if archive.getinfo("verifier.py").file_size > MAX_CODE_BYTES:
                raise ApiError(400, f"verifier.py is larger than {MAX_CODE_BYTES} bytes")
            return archive.read("verifier.py").decode()
    except (binascii.Error, zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise ApiError(400, f"bundle: not base64 of a zip with verifier.py ({error})") from error


def _failure_answer(kind: str, message: str) -> Answer:
    error = {"type": kind, "message": message, "traceback": ""}
    return {"success": False, "result": None, "error": error, "stdout": ""}


def _injected_answer(outcome: VerifierOutcome) -> Answer:
    if outcome.kind == "failed":
        return _failure_answer("RuntimeError", outcome.message)
    judged = outcome.kind == "judge_error"
    stdout = f"JUDGE ERROR: {outcome.message}\n" if judged else ""
    return {"success": True, "result": 0 if judged else None, "error": None, "stdout": stdout}
