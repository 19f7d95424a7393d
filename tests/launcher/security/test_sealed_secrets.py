"""A machine's error about sealed secrets that it cannot open."""

import asyncio
from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.security.sealed_secrets import load_or_make_key, seal_secrets, unseal_secrets
from tests.support.watched_machine import machine

SECRET = {"FLEET_API_KEY": "of-fleet"}


def test_what_skypilot_reads_itself_stays_as_it_is(tmp_path: Path) -> None:
    sealed = seal_secrets(
        {**SECRET, "SKYPILOT_DOCKER_PASSWORD": "of-a-registry"}, load_or_make_key(tmp_path)
    )
    assert sealed["SKYPILOT_DOCKER_PASSWORD"] == "of-a-registry"
    assert "of-fleet" not in sealed["FLEET_API_KEY"]


def test_values_that_did_not_come_sealed_need_no_key() -> None:
    environ = dict(SECRET)
    unseal_secrets(environ, None)
    assert environ == SECRET


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read"), (b"", "another key"), (b"another-run", "another key")],
)
def test_a_key_that_does_not_open_them_is_named_and_nothing_is_opened(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    environ = seal_secrets(SECRET, load_or_make_key(tmp_path))
    before, key_file = dict(environ), tmp_path / "key"
    if content is not None:
        key_file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"FLEET_API_KEY came sealed.*{reason}") as reported:
        unseal_secrets(environ, key_file)
    assert str(key_file) in str(reported.value)
    assert environ == before


async def test_a_watcher_without_the_key_starts_nothing_and_reports_why(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        here.secrets = seal_secrets(here.secrets, load_or_make_key(tmp_path))
        process = await here.watch("stay")
        assert await asyncio.wait_for(process.wait(), 40) == 2
        assert "FLOTILLA_TOKEN came sealed: pass --seal-key" in here.output
