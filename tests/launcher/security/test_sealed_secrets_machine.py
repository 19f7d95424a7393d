"""A watcher and its replica, as on a rented machine, with canaries for the machine's secrets.

SkyPilot passes the secrets in the watcher's environment, sealed. They get no
further than the tests state.
"""

import asyncio
import json
import signal
import stat
from pathlib import Path

import psutil

from flotilla_launcher.security.sealed_secrets import KEY_FILE, load_or_make_key, seal_secrets
from tests.support.canary import Canaries
from tests.support.watched_machine import WatchedMachine, machine

# Variables that services read directly, and so must find.
OWN = ("FLEET_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")


def give(here: WatchedMachine, canaries: Canaries) -> tuple[str, ...]:
    """Give the machine its secrets, the run's own and those of others, sealed as the launcher does
    it; return the watcher's options for them."""
    environ = canaries.environ("http://127.0.0.1:9")
    here.secrets |= {name: environ[name] for name in OWN}
    canaries.values = {name: canaries.values[name] for name in OWN}
    canaries.values["FLOTILLA_TOKEN"] = here.secrets["FLOTILLA_TOKEN"]
    text = here.secrets["FLOTILLA_TLS"]
    canaries.values["FLOTILLA_TLS"] = text[len(text) // 2 :]
    here.secrets = seal_secrets(here.secrets, load_or_make_key(here.temporary.parent))
    return ("--seal-key", str(here.temporary.parent / KEY_FILE))


async def test_the_runs_identity_stays_with_the_watcher_and_goes_with_it(
    tmp_path: Path,
) -> None:
    reported, canaries = tmp_path / "reported", Canaries()
    async with machine(tmp_path, tls=True, max_restarts=0) as here:
        options = give(here, canaries)
        process = await here.watch("report", str(reported), options=options, forged=False)
        await here.begins()
        await here.until(reported.exists)
        assert canaries.on_command_lines() == {}
        found = canaries.in_environments(here.left())
        assert set(map(frozenset, found.values())) == {frozenset(OWN)}
        watcher = psutil.Process(process.pid)
        assert canaries.in_environments([watcher]) == {process.pid: set()}
        _check_handed_over(here, json.loads(reported.read_text())["argv"])
        reported.unlink()
        await here.until(lambda: here.last() is not None)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 40)
        assert canaries.in_files(tmp_path) == {}
        assert not list(here.temporary.iterdir())


def _check_handed_over(here: WatchedMachine, argv: list[str]) -> None:
    """Check that only the owner may look into the folder with the files."""
    folder = Path(argv[argv.index("--tls-dir") + 1])
    assert folder.is_relative_to(here.temporary)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [path for path in here.temporary.iterdir() if path != folder]
