"""A worker whose prompts would be other token ids hears which part of its model differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla.learner.v1 import policy_service_pb2 as policies_pb
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.weights.fingerprint import (
    TokenizerDigests,
    tokenizer_digest,
    tokenizer_digests,
)
from tests.support.learner import FakeWorker, learner, make_config

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def folder(path: Path, *, words: str = "a b", template: str = TEMPLATE) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps({"words": words}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


async def refusals(tmp_path: Path, theirs: TokenizerDigests) -> list[ServiceError]:
    """Return what both services answer to a worker with these digests."""
    own = tokenizer_digests(folder(tmp_path / "own"))
    reported: dict[str, Any] = {
        "worker_id": "w0",
        "incarnation": "i",
        "tokenizer_digest": theirs.whole,
        "tokenizer_json_digest": theirs.tokenizer_json,
        "chat_template_digest": theirs.chat_template,
    }
    async with learner(tmp_path, make_config(tmp_path), tokenizer=own) as running:
        worker = FakeWorker(running.address)
        stream = worker.policies.Attach(policies_pb.AttachRequest(**reported), wait_for_ready=True)
        lease = groups_pb.LeaseGroupRequest(request_id="r", **reported)
        found = [
            await refusal(lambda: anext(aiter(stream))),
            await refusal(lambda: worker.groups.LeaseGroup(lease, timeout=10)),
        ]
        await worker.channel.close()
    return found


async def refusal(call: Callable[[], Any]) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()
    error = rpc.service_error(caught.value)
    assert error is not None
    assert error.reason == "TOKENIZER_MISMATCH"
    return error


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"template": TEMPLATE + " "}, "the chat template"),
        ({"words": "a b c"}, "tokenizer.json"),
        ({"template": "", "words": ""}, "tokenizer.json and the chat template"),
    ],
)
async def test_the_part_that_differs_is_named(
    tmp_path: Path, changed: dict[str, str], named: str
) -> None:
    theirs = tokenizer_digests(folder(tmp_path / "theirs", **changed))
    for error in await refusals(tmp_path, theirs):
        assert f": {named} of its policy.model differs" in error.message
        assert error.metadata["differs"] == named


async def test_a_worker_that_knows_only_the_whole_is_refused_all_the_same(tmp_path: Path) -> None:
    theirs = tokenizer_digest(folder(tmp_path / "theirs", template=""))
    for error in await refusals(tmp_path, TokenizerDigests(theirs)):
        assert "its tokenizer differs" in error.message
        assert "give both the same policy.model" in error.message
