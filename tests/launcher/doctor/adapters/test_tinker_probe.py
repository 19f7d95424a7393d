"""The doctor of a run at a Tinker service, at doubles that speak real HTTP."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tinker.lib.base_url import DEFAULT_BASE_URL

from flotilla_common.rpc.free_ports import free_address
from flotilla_launcher.config.tinker_rules import LIMITS
from flotilla_launcher.doctor.adapters.tinker_probe import HOSTED_URL
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.run_context import RunContext
from tests.support.doctor import Handle, check, double, probed, spec, subject

KEY = "tml-a-key-of-tinker-for-tests"
MODEL = {"model_name": "base", "max_context_length": 8192, "trainable": True, "sampleable": True}


def about(policy: Path, tasks: Path, folder: Path, url: str, **environ: str) -> RunContext:
    """A run at the service of this URL, whose variables have a key unless others are given."""
    content = spec(
        policy,
        tasks,
        "learner.engine=tinker",
        "learner.lora.rank=8",
        f"policy.tinker.url={url}",
        "policy.tinker.model=base",
    )
    return subject(content, folder, **{"TINKER_API_KEY": KEY, **environ})


def offers(*models: Mapping[str, Any]) -> Handle:
    """A service that takes the key and offers these models."""

    def answer(path: str, headers: Mapping[str, str], _: Mapping[str, Any]) -> tuple[int, Any]:
        assert path == "/api/v1/get_server_capabilities"
        if headers.get("x-api-key") != KEY:
            return 401, {"error": f"no user has the key {headers.get('x-api-key')}"}
        return 200, {"supported_models": list(models)}

    return answer


async def test_a_service_that_trains_the_model_is_good_and_its_limits_are_said(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    with double(offers({"model_name": "other"}, MODEL)) as url:
        result = await probed("tinker", about(policy, tasks, tmp_path, url))
        check(result, Status.OK, f"{url} takes the key, and trains base", *LIMITS)
        bare = spec(policy, tasks, "learner.engine=tinker", "policy.tinker.model=base")
        placed = subject(bare, tmp_path, TINKER_API_KEY=KEY, TINKER_BASE_URL=f"{url}/")
        check(await probed("tinker", placed), Status.OK, f"{url} takes the key")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"model_name": "other"},
            ("has no model base, but other", "set policy.tinker.model"),
        ),
        (
            {**MODEL, "trainable": False, "sampleable": False},
            ("base is not trainable and not sampleable",),
        ),
        (
            {**MODEL, "max_context_length": 4096},
            ("base takes 4096 tokens", "policy.max_model_len is 8192", "lower it to 4096"),
        ),
    ],
)
async def test_a_model_that_cannot_be_had_there_is_named(
    policy: Path, tasks: Path, tmp_path: Path, model: dict[str, Any], words: tuple[str, ...]
) -> None:
    with double(offers(model)) as url:
        result = await probed("tinker", about(policy, tasks, tmp_path, url))
    check(result, Status.FAIL, *words)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", ("export TINKER_API_KEY",)),
        ("sk-of-someone-else", ("does not begin with tml-", "export TINKER_API_KEY again")),
        (
            "tml-of-another-user",
            ("refuses the key in TINKER_API_KEY (401)", "export TINKER_API_KEY again"),
        ),
    ],
)
async def test_a_key_that_is_missing_or_refused_is_named(
    policy: Path, tasks: Path, tmp_path: Path, key: str, words: tuple[str, ...]
) -> None:
    with double(offers(MODEL)) as url:
        result = await probed("tinker", about(policy, tasks, tmp_path, url, TINKER_API_KEY=key))
    check(result, Status.FAIL, *words)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((402, {}), Status.FAIL, ("has no credit left for the account of TINKER_API_KEY",)),
        ((503, {"error": f"busy {KEY}"}), Status.WARN, ("answered 503: ", "[TINKER_API_KEY]")),
        ((404, {}), Status.FAIL, ("answered 404", "policy.tinker.url")),
        ((200, ["a list"]), Status.FAIL, ("does not answer as a Tinker service",)),
        ((200, {"supported_models": 7}), Status.FAIL, ("does not answer as a Tinker service",)),
        ((200, {"supported_models": ["base"]}), Status.FAIL, ("does not answer as a Tinker",)),
    ],
)
async def test_other_answers_are_told_with_what_to_do(
    policy: Path,
    tasks: Path,
    tmp_path: Path,
    answer: tuple[int, Any],
    status: Status,
    words: tuple[str, ...],
) -> None:
    with double(lambda *_: answer) as url:
        result = await probed("tinker", about(policy, tasks, tmp_path, url))
    check(result, status, *words)


async def test_a_service_that_is_not_there_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    url = f"http://{free_address()}"
    result = await probed("tinker", about(policy, tasks, tmp_path, url))
    check(result, Status.FAIL, f"{url} cannot be reached", "start the service")


async def test_weights_and_memory_are_no_concern_of_a_run_at_a_tinker_service(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    here = about(policy, tasks, tmp_path, "http://nowhere")
    for name in ("memory", "disk"):
        check(await probed(name, here), Status.SKIPPED, "at the Tinker service")
    check(await probed("versions", here), Status.OK, "tinker 0.38")
    elsewhere = subject(spec(policy, tasks), tmp_path)
    check(await probed("tinker", elsewhere), Status.SKIPPED, 'without learner.engine = "tinker"')


def test_a_run_without_an_address_goes_where_tinkers_own_client_would() -> None:
    assert HOSTED_URL == DEFAULT_BASE_URL
