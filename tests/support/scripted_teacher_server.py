"""A server that answers like vLLM, from a table of logprobs, and misbehaves on order."""

import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from flotilla_learner.config.teacher import TeacherConfig
from flotilla_learner.teacher.adapters.vllm_teacher import VllmTeacher
from tests.support.http_server import serving_app
from tests.support.rank_configs import policy_config

WORDS = 64
NAME, KEY = "teacher-8b", "teacher-key-0123"

# Changes the answer to a completion, or replaces it by a response.
Fault = Callable[[dict[str, Any]], Awaitable[web.Response | None]]


def write_tokenizer(folder: Path, *, first: int = 0) -> Path:
    """A folder whose tokenizer.json has a word for each id."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{first + n}": n for n in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"w{first}"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def table_logprobs(seed: int = 0) -> NDArray[np.float64]:
    """Logprobs of each token by the one before."""
    logits = np.random.default_rng(seed).normal(0, 1, (WORDS, WORDS))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@dataclass
class ScriptedTeacherServer:
    """What the server knows, and how it misbehaves: each fault meets one completion."""

    folder: Path
    table: NDArray[np.float64] = field(default_factory=table_logprobs)
    max_model_len: int = 1024
    faults: list[Fault] = field(default_factory=list[Fault])
    # Bodies of completions, whatever became of them.
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: set[str] = field(default_factory=set[str])
    # Requests in work, and the most at once.
    working: int = 0
    busiest: int = 0
    url: str = ""

    def score(self, ids: list[int], count: int) -> list[Any]:
        """As vLLM's `prompt_logprobs`."""
        found: list[Any] = [None]
        for before, token in pairwise(ids):
            row = self.table[before]
            chosen = dict.fromkeys([token, *np.argsort(-row, kind="stable")[:count].tolist()])
            found.append(
                {str(n): {"logprob": float(row[n]), "rank": 1, "decoded_token": ""} for n in chosen}
            )
        return found

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.add(request.headers.get("Authorization", ""))
        self.working += 1
        self.busiest = max(self.busiest, self.working)
        try:
            ids = body["prompt"]
            choice = {
                "prompt_logprobs": self.score(ids, body["prompt_logprobs"]),
                "prompt_token_ids": ids,
            }
            if self.faults and (response := await self.faults.pop(0)(choice)) is not None:
                return response
            return web.Response(
                text=json.dumps({"choices": [choice]}), content_type="application/json"
            )
        finally:
            self.working -= 1

    async def list_models(self, request: web.Request) -> web.Response:
        card = {"id": NAME, "root": str(self.folder), "max_model_len": self.max_model_len}
        return web.json_response({"data": [card]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return web.json_response({"tokens": tokenizer.encode(body["prompt"]).ids})


@asynccontextmanager
async def serving_teacher(server: ScriptedTeacherServer) -> AsyncGenerator[ScriptedTeacherServer]:
    """Serve it on a port of its own."""
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/tokenize", server.tokenize)
    async with serving_app(app) as address:
        server.url = f"{address}/v1"
        yield server


@asynccontextmanager
async def asking(
    server: ScriptedTeacherServer, own: Path, *, top_k: int = 0, **config: Any
) -> AsyncGenerator[VllmTeacher]:
    """A client of the server, for a policy with the tokenizer of the folder `own`."""
    settings = TeacherConfig.model_validate({"url": server.url, **config})
    digest = hashlib.sha256((own / "tokenizer.json").read_bytes()).digest()
    teacher = VllmTeacher(settings, top_k, policy_config(own), digest)
    try:
        yield teacher
    finally:
        await teacher.close()
