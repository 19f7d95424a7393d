"""One attempt is one trace: rollout and env_gateway as processes, and a learner in the test."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.learner.v1 import group_service_pb2_grpc, policy_service_pb2_grpc
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.telemetry.trace import HEADER
from flotilla_environments.tasks import make_task
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from tests.rollout.work.test_weight_updater import publication
from tests.support.fake_peers import TOKEN, FakeLearner, lease, served
from tests.support.repository import ROOT
from tests.support.waiting import until

SPEC: dict[str, Any] = {
    "name": "traced",
    "policy": {"model": "policy", "dtype": "float32", "max_model_len": 4096},
    "env_gateway": {"backend": "embedded", "verifiers": {"workers": 1}},
    "rollout": {
        "max_turns": 2,
        "max_input_length": 2000,
        "max_generate_length": 64,
        "attempt_timeout_s": 5.0,
        "grade_timeout_s": 5.0,
        "dialect": {"name": "template"},
        "engine": {"kind": "fake", "device": "cpu"},
    },
    "learner": {},
}


class TracedLearner(FakeLearner):
    """Keeps the trace context of every submission."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.traceparents: list[str] = []

    async def SubmitTrajectory(self, request_iterator: Any, context: Any) -> Any:
        self.traceparents.append(str(dict(context.invocation_metadata()).get(HEADER)))
        return await super().SubmitTrajectory(request_iterator, context)


def write_run(folder: Path) -> Path:
    """A spec, and the tokenizer of its policy."""
    (folder / "policy").mkdir()
    words = ["system user assistant Tools name arguments error done"]
    save_tokenizer(train_tokenizer(words * 3, 300), folder / "policy")
    spec = {**SPEC, "policy": {**SPEC["policy"], "model": str(folder / "policy")}}
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


@asynccontextmanager
async def process(service: str, spec: Path, *arguments: str) -> AsyncGenerator[None]:
    """A service process that records spans; it ends in good order, which writes them."""
    identity = ("--run-id", "traced", "--run-dir", str(spec.parent / "run"))
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"flotilla_{service}", "--config", str(spec), *identity),
        *arguments,
        cwd=ROOT,
        env={**os.environ, "FLOTILLA_TRACE": "1", "FLOTILLA_TOKEN": TOKEN},
    )
    try:
        yield
    finally:
        started.terminate()
        assert await asyncio.wait_for(started.wait(), 30.0) == 0


def spans(folder: Path, service: str) -> list[dict[str, Any]]:
    files = list((folder / "run" / "traces").glob(f"{service}-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def names_by_trace(rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["context"]["trace_id"], set()).add(row["name"].rpartition("/")[2])
    return found


@pytest.mark.slow
async def test_one_trace_id_joins_an_attempt_its_gateway_calls_and_its_submission(
    tmp_path: Path,
) -> None:
    spec = write_run(tmp_path)
    task = json.dumps(make_task("booking", "train", 0))
    learner = TracedLearner(leases=[lease(task_json=task)])
    learner.updates.put_nowait(publication(tmp_path / "weights", 1))
    gateway = free_address()

    def add(server: Any) -> None:
        group_service_pb2_grpc.add_GroupServiceServicer_to_server(learner, server)
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(learner, server)

    async with served(add) as address, process("env_gateway", spec, "--listen", gateway):
        peers = ("--peer", f"learner={address}", "--peer", f"env_gateway={gateway}")
        async with process("rollout", spec, *peers):
            await until(lambda: len(learner.submitted) == 2, 60.0)
    assert [submitted.header.failure for submitted in learner.submitted] == [0, 0]
    rollout = names_by_trace(spans(tmp_path, "rollout"))
    served_calls = names_by_trace(spans(tmp_path, "env_gateway"))
    attempts = [trace_id for trace_id, names in rollout.items() if "attempt" in names]
    assert len(attempts) == 2
    for trace_id in attempts:
        assert "generate" in rollout[trace_id]
        assert {"OpenEpisode", "Grade", "CloseEpisode"} <= served_calls[trace_id]
    submitted = sorted(f"0x{traceparent.split('-')[1]}" for traceparent in learner.traceparents)
    assert submitted == sorted(attempts)
