"""A `flotilla tinker-serve` under load, and a client of it that needs no SDK."""

import asyncio
import json
import os
import random
import secrets
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from flotilla.tinker.v1 import tinker_wire_pb2 as pb
from flotilla_common.rpc.free_ports import free_address

PROTOBUF = "application/x-protobuf"
START_S, END_S, CALL_S = 600.0, 60.0, 60.0
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class ServedTinker:
    """A running server; `keys` are its clients' by name."""

    url: str
    keys: Mapping[str, str]
    folder: Path
    process: Process

    def find_service(self, module: str) -> int | None:
        """Return the id of the process of a service, if it runs now."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(") ")[2].split()[1])
                words = (stat.parent / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            # While it starts it is still the program that ties it to its parent.
            if parent == self.process.pid and words[1:4] == [b"-P", b"-m", module.encode()]:
                return int(stat.parent.name)
        return None


@asynccontextmanager
async def tinker_served(
    model: Path, folder: Path, names: Sequence[str], **tables: Any
) -> AsyncGenerator[ServedTinker]:
    """Serve a model until the block ends, with a key for each name and these tables of the spec.
    What it prints is printed."""
    keys = {name: f"tml-{secrets.token_urlsafe(24)}" for name in names}
    variables = {name: f"BENCH_KEY_{name.upper()}" for name in names}
    front = {"keys": {name: f"${variable}" for name, variable in variables.items()}}
    spec = {**tables, "name": "tinker", "tinker": {**tables.get("tinker", {}), **front}}
    address = free_address()
    process = await asyncio.create_subprocess_exec(
        *(".venv/bin/flotilla", "tinker-serve", str(model), "--listen", address),
        *("--config", _write_spec(folder, spec), "--folder", str(folder / "state")),
        stdout=PIPE,
        env={**os.environ, **{variables[name]: key for name, key in keys.items()}},
    )
    try:
        async with asyncio.timeout(START_S):
            await _wait_until_ready(process)
        showing = asyncio.create_task(_show_lines(process))
        yield ServedTinker(f"http://{address}", keys, folder / "state", process)
        showing.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(END_S):
            await process.wait()


def _write_spec(folder: Path, spec: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True)
    path = folder / "given.json"
    path.write_text(json.dumps(spec))
    return str(path)


async def _wait_until_ready(process: Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        print(line.decode().rstrip())
        if line.startswith(b"Ready"):
            return
    raise RuntimeError("tinker-serve has not started; its lines are above")


async def _show_lines(process: Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        print(line.decode().rstrip())


class Refused(Exception):
    """The server refuses a call for good."""


class WireClient:
    """Calls of one key, sent again until the server answers, as the SDK does."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http = http
        self._url = f"{url}/api/v1"
        self._headers = {"X-API-Key": key}

    async def ask(self, path: str, /, **body: Any) -> Any:
        """Send JSON; return the answer's."""
        return json.loads(await self.send(path, json.dumps(body).encode()))

    async def send(self, path: str, body: bytes | None, kind: str = "application/json") -> bytes:
        """Send a body, or without one get the path. Raises Refused."""
        headers = {**self._headers, "Content-Type": kind, "Accept": f"{PROTOBUF}, */*"}
        method = "GET" if body is None else "POST"
        while True:
            try:
                async with self._http.request(
                    method, f"{self._url}/{path}", data=body, headers=headers
                ) as answer:
                    content = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(PAUSE_S * (1 + random.random()))
                continue
            if answer.status == 200:
                return content
            if answer.status == 429 or answer.status >= 500:
                await asyncio.sleep(PAUSE_S * (1 + random.random()))
            elif answer.status != 408:
                raise Refused(f"{path}: {answer.status} {content[:300]!r}")

    async def fetch(self, request_id: str) -> bytes:
        """Wait for the outcome of an order."""
        return await self.send("retrieve_future", json.dumps({"request_id": request_id}).encode())

    async def open_session(self) -> str:
        answer = await self.ask("create_session", sdk_version="0.38.0")
        return answer["session_id"]

    async def open_sampler(self, session_id: str, seq_id: int, **target: str) -> str:
        answer = await self.ask(
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=seq_id,
            **target,
        )
        return answer["sampling_session_id"]


@asynccontextmanager
async def http_session() -> AsyncGenerator[aiohttp.ClientSession]:
    """Connections without a limit: each request that waits holds one."""
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        yield http


def sample_body(
    sampler_id: str, seq_id: int, prompt: Sequence[int], seed: int, max_tokens: int
) -> bytes:
    """Return a request for one sample at temperature 1."""
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
        "sampling_params": {"max_tokens": max_tokens, "seed": seed, "temperature": 1.0},
        "num_samples": 1,
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
    }
    return json.dumps(body).encode()


def loss_body(model_id: str, seq_id: int, sequences: Sequence[Sequence[int]]) -> bytes:
    """Return a request for the gradient of the cross entropy of sequences."""
    data = [_datum(np.array(ids)) for ids in sequences]
    return pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=data, loss_fn="cross_entropy"
    ).SerializeToString()


def _datum(ids: "np.ndarray[Any, Any]") -> pb.Datum:
    tokens, length = ids[:-1].astype("<i4").tobytes(), len(ids) - 1
    targets, weights = ids[1:].astype("<i8").tobytes(), np.ones(length, "<f4").tobytes()
    return pb.Datum(
        model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens))],
        loss_fn_inputs={
            "target_tokens": pb.Tensor(dense=targets, dtype=pb.ARRAY_TYPE_INT64, shape=[length]),
            "weights": pb.Tensor(dense=weights, dtype=pb.ARRAY_TYPE_FLOAT32, shape=[length]),
        },
    )
