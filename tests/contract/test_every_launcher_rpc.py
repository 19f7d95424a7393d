"""Every rpc that a launcher serves, through a real client: found by descriptors, none left out."""

import inspect
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from flotilla.launcher.v1 import registry_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.rpc import service_error
from flotilla_launcher.api.registry_service import RegistryService
from tests.contract.launcher_cases import CASES, Case, World
from tests.support.every_rpc import of_service, refusals
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import TOKEN, serving
from tests.support.repository import ROOT

SERVED = ("RunService", "RegistryService")
# Ways in which a call of any rpc may be wrong; a case has each, or a reason why it cannot be.
KINDS = {"bad input", "unknown run"}
METHODS = {rpc.path.rpartition(".")[2]: rpc for rpc in of_service(*SERVED)}
WRONG = [(name, kind) for name, case in CASES.items() for kind in case.refused]
# These show a run that continues meanwhile.
MOVING = {"RunService/GetRun", "RunService/ListRuns"}
REASON = re.compile(r'StatusCode\.([A-Z_]+),\s*"([A-Z_]+)"')
DOCUMENTED = re.compile(r"^//   ([A-Z_]+) +([A-Z_]+)\b", re.MULTILINE)


@asynccontextmanager
async def world(folder: Path) -> AsyncGenerator[World]:
    backend = FakeBackend()
    async with serving(folder, backend, stream_age_s=0.3) as served:
        found = World(served, backend, folder)
        await found.begin()
        yield found


async def answers(found: World, name: str, request: Any) -> list[Any]:
    """All answers of an rpc; streams end when they are old."""
    service, _, method = name.partition("/")
    stub = found.served.runs if service == "RunService" else found.served.registry
    call = getattr(stub, method)(request, timeout=20.0)
    if not METHODS[name].streams_responses:
        return [await call]
    replies: list[Any] = []
    try:
        async for each in call:
            replies.append(each)
    except grpc.aio.AioRpcError as error:
        # A refused stream has another reason.
        known = service_error(error)
        if known is None or known.reason != "STREAM_AGE":
            raise
    return replies


def test_no_rpc_is_without_a_case_and_no_case_without_what_may_be_wrong() -> None:
    assert set(CASES) == set(METHODS)
    for name, case in CASES.items():
        assert set(case.refused) | set(case.never) >= KINDS, name
        assert not set(case.refused) & set(case.never), name


@pytest.mark.parametrize("name", CASES)
async def test_a_good_call_has_its_effect_and_its_repeat_the_same_answer(
    tmp_path: Path, name: str
) -> None:
    case: Case = CASES[name]
    async with world(tmp_path) as found:
        first = await answers(found, name, case.request(found))
        shown = case.shows(found, first)
        assert await shown if inspect.isawaitable(shown) else shown, first
        again = await answers(found, name, case.request(found))
        # A stream of events may know more by now.
        assert again[: len(first)] == first or name in MOVING
        shown = case.shows(found, again)
        assert await shown if inspect.isawaitable(shown) else shown, again


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    """One world for all calls that are refused: each leaves it as it was."""
    async with world(tmp_path_factory.mktemp("world")) as found:
        yield found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "kind"), WRONG, ids=lambda word: word.replace(" ", "-"))
async def test_what_is_wrong_with_a_call_is_named(
    lasting_world: World, name: str, kind: str
) -> None:
    make, expected = CASES[name].refused[kind]
    served, run_id = lasting_world.served, lasting_world.run_id
    before = await served.get(run_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(lasting_world, name, make(lasting_world))
    error = service_error(caught.value)
    assert error is not None
    assert (error.code, error.reason, error.domain) == (*expected, "launcher.flotilla")
    assert error.message
    # Nothing came of it.
    assert (await served.get(run_id)).replicas == before.replicas


@pytest.mark.parametrize("token", [None, "a-token-of-another-run"])
async def test_a_caller_without_the_token_gets_nothing_from_a_launcher(
    tmp_path: Path, token: str | None
) -> None:
    async with world(tmp_path) as found:
        async with rpc.plain_channel(found.served.address) as channel:
            codes = await refusals(channel, METHODS.values(), token=token)
        assert codes == {each.path: grpc.StatusCode.UNAUTHENTICATED for each in METHODS.values()}
        assert (await found.served.get(found.run_id)).run_id == found.run_id


async def test_the_registry_of_one_run_takes_nothing_about_another(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        server = rpc.server(token=TOKEN)
        service = RegistryService(found.served.launcher, run_id="another")
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(service, server)
        async with (
            rpc.serving(server, "127.0.0.1:0", grace_s=0.2) as at,
            rpc.channel(at.address, token=TOKEN) as channel,
        ):
            stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
            elsewhere = replace(found, served=replace(found.served, registry=stub))
            for name in METHODS:
                if name.startswith("RegistryService"):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await answers(elsewhere, name, CASES[name].request(found))
                    error = service_error(caught.value)
                    assert error is not None and error.reason == "UNKNOWN_RUN", name


def test_every_reason_is_in_the_contract_and_the_contract_has_no_other() -> None:
    protos = ROOT / "protos/flotilla/launcher/v1"
    documented = {
        found for path in protos.glob("*.proto") for found in DOCUMENTED.findall(path.read_text())
    }
    modules = (ROOT / "services/launcher").rglob("*.py")
    assert documented == {found for path in modules for found in REASON.findall(path.read_text())}
