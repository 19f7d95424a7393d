"""`python -m flotilla_rollout.sampling`, from a spec as small as it may be to both of its ends."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from flotilla.rollout.v1 import sampling_service_pb2 as pb
from flotilla.rollout.v1 import sampling_service_pb2_grpc as pb_grpc
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.exit_codes import OK, RETRYABLE
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc import rpc
from tests.rollout.sampling.served_samplers import PROMPT, order, spans_of, tokens_of
from tests.support.echo_service import TOKEN

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(560)]

SPEC = """
name = "samplers"
[policy]
model = "{model}"
dtype = "float32"
max_model_len = 256
[rollout.engine]
device = "cpu"
max_num_seqs = 4
"""


@asynccontextmanager
async def sampling_process(
    model: Path, folder: Path
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and its address."""
    spec = folder / "spec.toml"
    spec.write_text(SPEC.format(model=model))
    process = await asyncio.create_subprocess_exec(
        *python_command("-m", "flotilla_rollout.sampling", "--config", str(spec)),
        *("--run-dir", str(folder / "run"), "--listen", "127.0.0.1:0"),
        env={**child_environment(ours=True), "FLOTILLA_TOKEN": TOKEN},
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        yield process, await read_address(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def read_address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = b""
    while line := await process.stderr.readline():
        seen += line
        if b'"serving"' in line:
            return json.loads(line)["address"]
    raise AssertionError(seen.decode())


async def test_it_serves_by_a_small_spec_and_ends_when_asked(
    engine_folder: Path, tmp_path: Path
) -> None:
    async with (
        sampling_process(engine_folder, tmp_path) as (process, address),
        rpc.channel(address, token=TOKEN) as channel,
    ):
        stub: Any = pb_grpc.SamplingServiceStub(channel)
        described = await stub.DescribeEngine(pb.DescribeEngineRequest())
        assert described == pb.DescribeEngineResponse(
            model=str(engine_folder),
            max_model_len=256,
            vocabulary=384,
            max_rank=32,
            max_num_seqs=4,
            max_samplers=64,
        )
        weights = pb.SamplerWeights(label="base", base=True)
        await stub.OpenSampler(pb.OpenSamplerRequest(sampler_id="base", weights=weights))
        answer = (await stub.Sample(order("base", max_tokens=0))).answers[0]
        assert spans_of(answer) == [("base", len(tokens_of(answer)))]
        assert len(tokens_of(answer)) == 256 - len(PROMPT)
        process.terminate()
        assert await process.wait() == OK


async def test_it_ends_to_be_replaced_when_its_engine_does(
    engine_folder: Path, tmp_path: Path
) -> None:
    async with (
        sampling_process(engine_folder, tmp_path) as (process, address),
        rpc.channel(address, token=TOKEN, wait_for_ready=False) as channel,
    ):
        stub: Any = pb_grpc.SamplingServiceStub(channel)
        weights = pb.SamplerWeights(label="base", base=True)
        await stub.OpenSampler(pb.OpenSamplerRequest(sampler_id="base", weights=weights))
        running = asyncio.ensure_future(stub.Sample(order("base", num_samples=64, max_tokens=0)))
        await asyncio.sleep(1.0)
        children = psutil.Process(process.pid).children(recursive=True)
        engine = next(each for each in children if "EngineCore" in each.name())
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running
        # The channel asks again, and finds no process.
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await process.wait() == RETRYABLE
