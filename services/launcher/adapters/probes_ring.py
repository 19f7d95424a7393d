"""Joins processes of this machine in one torch group, and passes a tensor around them.

One process asks the others to join and tells what came of it; `--rank` makes one of those.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from services.launcher.doctor.children import answer
from services.launcher.doctor.results import Finding, fail, ok

_JOIN_S = 40.0
_ELEMENTS = 1 << 16
_HOST = "127.0.0.1"


def probe(question: Mapping[str, Any]) -> list[Finding]:
    world, backend = int(question["world"]), str(question["backend"])
    started = time.monotonic()
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port = listener.getsockname()[1]
    members = [_member(rank, world, backend, port) for rank in range(world)]
    said = [_outcome(member, started + _JOIN_S) for member in members]
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if wrong:
        return [fail(f"{backend} ring of {world}: {wrong[0]}", _fix(backend, wrong[0]))]
    took = time.monotonic() - started
    return [ok(f"{backend} ring of {world} processes passed {_ELEMENTS * 4} bytes in {took:.1f} s")]


def _member(rank: int, world: int, backend: str, port: int) -> "subprocess.Popen[bytes]":
    options = ("--rank", str(rank), "--world", str(world), "--port", str(port))
    # The session of the one that asks: a deadline ends them all.
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *options, "--backend", backend],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _outcome(member: "subprocess.Popen[bytes]", until: float) -> str:
    """What went wrong with a member; "" for nothing."""
    try:
        _, errors = member.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        member.kill()
        member.communicate()
        return f"did not come through within {_JOIN_S:g} s"
    if member.returncode == 0:
        return ""
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return (lines or [f"ended with code {member.returncode}"])[-1][:300]


def _fix(backend: str, text: str) -> str:
    if "No module named" in text:
        return "pip install 'flotilla[learner]', or `make setup`"
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    interface = os.environ.get(variable)
    names = ", ".join(name for _, name in socket.if_nameindex())
    if interface:
        return f"{variable} is {interface!r}; set it to one of {names}, or unset it"
    return (
        f"set {variable} to the interface that the nodes share (here: {names}), and let it through"
    )


def _join(options: argparse.Namespace) -> None:
    """What one member does: take from the one before, give to the next, then add up together."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", options.rank) if options.backend == "nccl" else None
    dist.init_process_group(
        options.backend,
        init_method=f"tcp://{_HOST}:{options.port}",
        rank=options.rank,
        world_size=options.world,
        timeout=timedelta(seconds=_JOIN_S),
    )
    given = torch.full((_ELEMENTS,), float(options.rank), device=device)
    taken = torch.empty_like(given)
    following, before = (options.rank + 1) % options.world, (options.rank - 1) % options.world
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, given, following), dist.P2POp(dist.irecv, taken, before)]
    ):
        work.wait()
    if not bool((taken == float(before)).all()):
        sys.exit(f"got other numbers than rank {before} sent")
    dist.all_reduce(given)
    if not bool((given == float(sum(range(options.world)))).all()):
        sys.exit("the sum over all ranks is wrong")
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _options()
    if chosen.rank is None:
        answer(probe)
    else:
        _join(chosen)
