"""Kills the processes of a busy `flotilla tinker-serve`: `python -m benchmarks.tinker_campaign`.

    python -m benchmarks.tinker_campaign build/tiny-0 --minutes 5

Three clients with keys of their own sample and train on a CPU, through plain HTTP; the first begins
with 1,024 requests of one sample concurrently. All the while the front door, the trainer and the
sampler are killed by SIGKILL at random moments. At last every outcome is asked for again, and each
model is trained once more by the same orders without kills.

The last line is one JSON object: `orders`, how many were acknowledged; `lost`, those without a
result; `changed`, those whose result, or answer to the same request sent again, was another the
second time; `unasked`, orders in the journal that no client was told of; `failed`, results that are
errors; `unequal_results` and `unequal_weights`, gradients' results and exported adapters that
differ from those without kills; `share_off`, how far the samples of a client are from a third, as a
part of it; `kills` by process; `burst_s`, seconds until all of the first 1,024 were acknowledged,
and until they were answered. The exit code is 1 if a share is off by more than 0.1, or a count of
what must not happen is not 0.
"""

import argparse
import asyncio
import hashlib
import io
import json
import os
import random
import signal
import sqlite3
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tinker_client import (
    PROTOBUF,
    ServedTinker,
    WireClient,
    http_session,
    loss_body,
    sample_body,
    tinker_served,
)
from flotilla.tinker.v1 import tinker_wire_pb2 as pb

NAMES = ("ann", "ben", "cem")
MODULES = {
    "front": "flotilla_tinker",
    "trainer": "flotilla_learner.training",
    "sampler": "flotilla_rollout.sampling",
}
BURST, IN_FLIGHT, ANSWER = 1024, 48, 64
KILL_EVERY_S = (5.0, 25.0)
SAVE_EVERY, RANK = 5, 8
# Of repeated requests among all.
REPEATED = 0.05
WORST_SHARE = 0.1
WINDOW = 512
FINAL = "final"


@dataclass
class Client:
    """A client's orders, and what came of them."""

    number: int
    wire: WireClient
    model: str
    vocabulary: int
    session_id: str = ""
    sampler_id: str = ""
    samples: int = 0
    steps: int = 0
    # The digest of each outcome; None until it came.
    outcomes: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    changed: int = 0
    failures: list[str] = field(default_factory=list[str])
    # Of the gradients, by step.
    results: list[bytes] = field(default_factory=list[bytes])
    weights: bytes = b""

    async def open(self) -> None:
        self.session_id = await self.wire.open_session()
        self.sampler_id = await self.wire.open_sampler(self.session_id, 0, base_model=self.model)

    async def order(self, path: str, body: bytes, kind: str = "application/json") -> str:
        """Send an order, some of them twice; return the request's id."""
        answers = [
            json.loads(await self.wire.send(path, body, kind))["request_id"]
            for _ in range(2 if random.random() < REPEATED else 1)
        ]
        self.changed += len(set(answers)) - 1
        self.outcomes.setdefault(answers[0], None)
        return answers[0]

    async def order_json(self, path: str, /, **body: Any) -> str:
        return await self.order(path, json.dumps(body).encode())

    async def take(self, request_id: str) -> bytes:
        """Wait for an outcome, and compare it with the one that came before."""
        content = await self.wire.fetch(request_id)
        digest, before = hashlib.sha256(content).digest(), self.outcomes[request_id]
        self.changed += before not in (None, digest)
        self.outcomes[request_id] = digest
        if before is None and is_failure(content):
            self.failures.append(content.decode())
        return content

    async def order_sample(self) -> str:
        self.samples += 1
        draw = random.Random(self.samples)
        prompt = [draw.randrange(self.vocabulary) for _ in range(16)]
        body = sample_body(self.sampler_id, self.samples, prompt, self.samples, ANSWER)
        return await self.order("asample", body)

    async def burst(self) -> tuple[float, float]:
        """Return the seconds until all requests were acknowledged, and answered."""
        began = time.monotonic()
        ids = await asyncio.gather(*(self.order_sample() for _ in range(BURST)))
        accepted_s = time.monotonic() - began
        await asyncio.gather(*(self.take(each) for each in ids))
        return accepted_s, time.monotonic() - began

    async def keep_sampling(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await self.take(await self.order_sample())

    async def train(self, model_seq: int, stopping: asyncio.Event, most: int | None = None) -> None:
        """Train a new model until stopped, or so many steps; keep what it computes."""
        model_id, seq = await self._create_model(model_seq), 0
        while not stopping.is_set() and most != self.steps:
            seq, step = seq + 2, self.steps
            body = loss_body(model_id, seq - 1, self._data(step))
            backward = await self.order("forward_backward", body, PROTOBUF)
            adam = {"learning_rate": 1e-3}
            update = await self.order_json(
                "optim_step", model_id=model_id, seq_id=seq, adam_params=adam
            )
            self.results.append(await self.take(backward))
            await self.take(update)
            self.steps += 1
            if self.steps % SAVE_EVERY == 0:
                seq += 1
                await self._sample_from(model_id, seq, 1 + 10_000 * model_seq + self.steps)
        self.weights = await self._export(model_id, seq + 1)

    async def _create_model(self, model_seq: int) -> str:
        request_id = await self.order_json(
            "create_model",
            session_id=self.session_id,
            model_seq_id=model_seq,
            base_model=self.model,
            lora_config={"rank": RANK, "seed": self.number},
        )
        return json.loads(await self.take(request_id))["model_id"]

    def _data(self, step: int) -> list[list[int]]:
        draw = random.Random(f"{self.number}/{step}")
        return [[draw.randrange(self.vocabulary) for _ in range(48)] for _ in range(4)]

    async def _sample_from(self, model_id: str, seq: int, sampler_seq: int) -> None:
        """Sample from the newest weights, and check that it was them."""
        saved = await self.order_json(
            "save_weights_for_sampler",
            model_id=model_id,
            seq_id=seq,
            sampling_session_seq_id=sampler_seq,
        )
        answer = await self.take(saved)
        if is_failure(answer):
            return
        sampler_id = json.loads(answer)["sampling_session_id"]
        body = sample_body(sampler_id, 1, [1, 2, 3], 1, ANSWER)
        content = await self.take(await self.order("asample", body))
        if is_failure(content):
            return
        spans = pb.SampleResponse.FromString(content).sequences[0].policy_spans
        if [span.policy for span in spans] != [f"{model_id}@{self.steps}"]:
            self.failures.append(f"step {self.steps} was sampled by {spans}")

    async def _export(self, model_id: str, seq: int) -> bytes:
        """Return the digest of the model's adapter."""
        saved = await self.order_json(
            "save_weights_for_sampler", model_id=model_id, seq_id=seq, path=FINAL
        )
        await self.take(saved)
        place = f"training_runs/{model_id}/checkpoints/sampler_weights/{FINAL}/archive"
        content = await self.wire.send(place, None)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            file = archive.extractfile("./adapter_model.safetensors")
            assert file is not None
            return hashlib.sha256(file.read()).digest()

    async def take_again(self) -> None:
        for request_id in list(self.outcomes):
            await self.take(request_id)


def is_failure(outcome: bytes) -> bool:
    return outcome[:1] == b"{" and "error" in json.loads(outcome)


async def keep_killing(served: ServedTinker, kills: "Counter[str]") -> None:
    """Kill one process after another, each as often as the others."""
    turns: list[str] = []
    while True:
        turns = turns or random.sample(sorted(MODULES), len(MODULES))
        await asyncio.sleep(random.uniform(*KILL_EVERY_S))
        if pid := served.find_service(MODULES[turns[-1]]):
            name = turns.pop()
            os.kill(pid, signal.SIGKILL)
            kills[name] += 1
            print(f"killed {name}", flush=True)


async def run_clients(
    clients: Sequence[Client], served: ServedTinker, minutes: float
) -> dict[str, Any]:
    """Have the clients work for so long, amid kills; return what they saw."""
    stopping, kills = asyncio.Event(), Counter[str]()
    await each(client.open() for client in clients)
    began_s = time.time()
    killing = asyncio.create_task(keep_killing(served, kills))
    burst = asyncio.create_task(clients[0].burst())
    work = [client.train(1, stopping) for client in clients]
    work += [client.keep_sampling(stopping) for client in clients for _ in range(IN_FLIGHT)]
    working = asyncio.gather(*work)
    tasks = (working, killing, burst)
    await asyncio.wait(tasks, timeout=minutes * 60, return_when="FIRST_EXCEPTION")
    if killing.done():
        killing.result()
    killing.cancel()
    ended_s = time.time()
    stopping.set()
    await working
    accepted_s, answered_s = await burst
    found = count_samples(served.folder, began_s, ended_s)
    third = sum(found.values()) / len(clients)
    off = max(abs(found[name] - third) for name in NAMES) / third
    return {
        "kills": dict(kills),
        "samples": dict(found),
        "share_off": round(off, 3),
        "burst_s": [round(accepted_s, 1), round(answered_s, 1)],
    }


def read_journal(folder: Path, query: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(folder / "front" / "tinker.sqlite", timeout=30)) as db:
        return db.execute(query, values).fetchall()


def count_samples(folder: Path, began_s: float, ended_s: float) -> "Counter[str]":
    query = (
        "SELECT tenant, count(*) FROM orders WHERE kind = 'sample' AND done_s BETWEEN ? AND ?"
        " GROUP BY tenant"
    )
    return Counter(dict(read_journal(folder, query, began_s, ended_s)))


async def each(calls: "Sequence[Coroutine[Any, Any, None]] | Any") -> None:
    await asyncio.gather(*calls)


async def run_campaign(model: Path, minutes: float, folder: Path) -> dict[str, Any]:
    names = {name: number for number, name in enumerate(NAMES)}
    facts = json.loads((model / "config.json").read_text())
    tables = {
        "policy": {"dtype": "float32", "max_model_len": WINDOW},
        "rollout": {"engine": {"device": "cpu", "max_num_seqs": 16}},
        "learner": {"rank": {"device": "cpu"}},
        "tinker": {"retention": {"delivered_s": 36_000.0, "undelivered_s": 36_000.0}},
    }
    async with tinker_served(model, folder, NAMES, **tables) as served, http_session() as http:

        def make(name: str) -> Client:
            wire = WireClient(http, served.url, served.keys[name])
            return Client(names[name], wire, str(model), facts["vocab_size"])

        clients = [make(name) for name in NAMES]
        seen = await run_clients(clients, served, minutes)
        await each(client.take_again() for client in clients)
        acknowledged = {one for client in clients for one in client.outcomes}
        kept = {one for (one,) in read_journal(served.folder, "SELECT request_id FROM orders")}
        again = [make(name) for name in NAMES]
        for one, first in zip(again, clients, strict=True):
            await one.open()
            await one.train(1, asyncio.Event(), first.steps)
        return seen | {
            "minutes": minutes,
            "orders": len(acknowledged),
            "lost": sum(not got for client in clients for got in client.outcomes.values())
            + len(acknowledged - kept),
            "changed": sum(client.changed for client in clients),
            "unasked": len(kept - acknowledged),
            "failed": sum(len(client.failures) for client in (*clients, *again)),
            "failures": [text for client in (*clients, *again) for text in client.failures][:3],
            "steps": [client.steps for client in clients],
            "unequal_results": sum(
                one != other
                for first, second in zip(clients, again, strict=True)
                for one, other in zip(first.results, second.results, strict=True)
            ),
            "unequal_weights": sum(
                first.weights != second.weights
                for first, second in zip(clients, again, strict=True)
            ),
        }


ZEROS = ("lost", "changed", "unasked", "failed", "unequal_results", "unequal_weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a folder of a small Hugging Face model")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="a new folder, which is kept")
    given = parser.parse_args()
    model = given.model.absolute()
    if given.folder is not None:
        found = asyncio.run(run_campaign(model, given.minutes, given.folder))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(run_campaign(model, given.minutes, Path(folder) / "run"))
    print(json.dumps(found))
    good = all(not found[name] for name in ZEROS) and found["share_off"] <= WORST_SHARE
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
