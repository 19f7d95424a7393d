"""Kills machines of one run in cluster mode: `.venv-sky/bin/python -m tests.sky.machine_kills`.

The run is that of `test_whole_run`: real launcher, SkyPilot, Slurm, watchers and services. Each
kill ends all processes of the node of a random replica; every second learner loses its disk too.
Then the service must serve on another node and the run commit two more steps. After the last kill
the run is stopped, and nothing of it may be left.

One line is printed per kill; the last line is JSON: `kills`, kills by service, `lost_steps`
(committed steps that a lost disk took, which are trained again), and `minutes`.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.state import LEARNER, SERVICES
from tests.sky.session import SkySession
from tests.sky.whole_run import UP_S, Site, WholeRun, launched, materials, spec, started


async def run_kills(site: Site, kills: int, chooser: random.Random) -> dict[str, object]:
    begun, by_service, lost_steps = time.monotonic(), Counter[str](), 0
    wish = spec(site)
    wish["launcher"]["max_hours"] = 3.0
    run = await started(site, wish)
    for number in range(1, kills + 1):
        for service in SERVICES:
            await run.serving(service)
        service = chooser.choice(SERVICES)
        loses_disk = service == LEARNER and by_service[LEARNER] % 2 == 1
        by_service[service] += 1
        at = time.monotonic()
        before, after = await kill(run, service, loses_disk)
        lost_steps += max(before - after, 0)
        lost = " and its disk" if loses_disk else ""
        print(
            f"kill {number}: {service}'s machine{lost}, {time.monotonic() - at:.0f} s to two more "
            f"steps; step {before} before, {after} after",
            flush=True,
        )
    ended = await run.stop()
    assert ended.cleanup == pb.CLEANUP_VERIFIED, ended.cleanup_detail
    while run.allocations() or run.leftovers():
        assert time.monotonic() - begun < 4 * 3600, (run.allocations(), run.leftovers())
        await asyncio.sleep(1.0)
    return {
        "kills": kills,
        **by_service,
        "lost_steps": lost_steps,
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }


async def kill(run: WholeRun, service: str, loses_disk: bool) -> tuple[int, int]:
    """Kill the machine of the service's first replica; return the committed step before, and that
    from which the run went on."""
    if loses_disk:
        await run.until(lambda _: run.uploaded() >= 1, UP_S)
    box, node, before = run.session.box, await run.serving(service), run.steps()
    box.kill_node(node)
    if loses_disk:
        run.lose_disk()
    await run.serving(service, but=node)
    box.revive_node(node)
    after = run.restored()[-1] if loses_disk else run.steps()
    await run.until(lambda _: run.steps() >= after + 2, UP_S)
    return before, after


async def main(kills: int, seed: int) -> None:
    with (
        SkySession() as session,
        session.inside(),
        tempfile.TemporaryDirectory() as folder,
        materials(session) as made,
    ):
        async with launched(session, Path(folder), made) as site:
            print(json.dumps(await run_kills(site, kills, random.Random(seed))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    asyncio.run(main(wanted.kills, wanted.seed))
