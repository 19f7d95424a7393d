"""One rank of a ring: joins the others in one torch group, and passes a tensor around them.

Its seat comes from standard input, and what came of it goes to standard output. Rank 0 is given
the descriptor of the socket at which the others find it.
"""

import json
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

from services.common.text import say
from services.launcher.doctor.findings import first_line
from services.launcher.doctor.network_check import (
    INTERFACES,
    listen,
    mend,
    speak_towards,
    unreached,
)
from services.launcher.doctor.ring_rank import LIMIT_S, Outcome, Seat

# The others may be importing torch, which takes a while from a cold disk.
_MEET = timedelta(seconds=50)
_JOIN = timedelta(seconds=15)
_ELEMENTS = 1 << 16
_GLOO, _NCCL = "gloo", "nccl"


class _BlockedError(Exception):
    """Another rank is not reached."""


def sit(seat: Seat, listener: int | None) -> Outcome:
    """Meet, try each way by itself, then join the group."""
    version = ""
    try:
        import torch

        version = str(torch.__version__)
        how = _through(seat, listener)
    except ImportError as error:
        return Outcome(str(error), "pip install 'flotilla[learner]' there, or `make setup`")
    except _BlockedError as error:
        return Outcome(str(error), mend(seat.host), blocked=True, torch=version)
    # What torch raises is a RuntimeError, whichever backend it is from.
    except (RuntimeError, ValueError, OSError) as error:
        return Outcome(first_line(str(error)) or repr(error), _fix(), torch=version)
    return Outcome(how=how, torch=version)


def _through(seat: Seat, listener: int | None) -> str:
    """The backend, with what there is to say of it. Raises _BlockedError, and what torch raises."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    own = speak_towards(seat.host)
    if listener is None and (wrong := unreached({0: (seat.host, seat.port)})):
        raise _BlockedError(wrong[0])
    store = _store(seat, listener)
    with listen(own) as door:
        facts = _met(store, seat, own, door)
        peers = {rank: (fact["host"], fact["port"]) for rank, fact in facts.items()}
        if wrong := unreached({rank: at for rank, at in peers.items() if rank != seat.rank}):
            raise _BlockedError(", ".join(wrong))
        without = [str(rank) for rank, fact in sorted(facts.items()) if not fact["gpu"]]
        backend = _NCCL if seat.gpu is not None and not without else _GLOO
        dist.init_process_group(
            backend, store=store, rank=seat.rank, world_size=seat.world, timeout=_JOIN
        )
        _pass_around(seat, backend)
        dist.destroy_process_group()
    if seat.gpu is None or backend == _NCCL:
        return backend
    return f"{backend}, not {_NCCL}, for no GPU is seen by rank {', '.join(without)}"


def _store(seat: Seat, listener: int | None) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(
        seat.host,
        seat.port,
        is_master=listener is not None,
        master_listen_fd=listener,
        wait_for_workers=False,
        timeout=_MEET,
    )


def _met(store: Any, seat: Seat, own: str, door: socket.socket) -> dict[int, dict[str, Any]]:
    """What each rank says of itself, once all have."""
    import torch

    has_gpu = seat.gpu is not None and torch.cuda.device_count() > seat.gpu
    fact = {"host": own, "port": door.getsockname()[1], "gpu": has_gpu}
    store.set(f"rank {seat.rank}", json.dumps(fact))
    return {rank: json.loads(store.get(f"rank {rank}")) for rank in range(seat.world)}


def _pass_around(seat: Seat, backend: str) -> None:
    """Take from the one before, give to the next, then add up together."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", seat.gpu or 0) if backend == _NCCL else None
    given = torch.full((_ELEMENTS,), float(seat.rank), device=device)
    taken = torch.empty_like(given)
    following, before = (seat.rank + 1) % seat.world, (seat.rank - 1) % seat.world
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, given, following), dist.P2POp(dist.irecv, taken, before)]
    ):
        work.wait()
    if not bool((taken == float(before)).all()):
        raise ValueError(f"got other numbers than rank {before} sent")
    dist.all_reduce(given)
    if not bool((given == float(sum(range(seat.world)))).all()):
        raise ValueError("the sum over all ranks is wrong")


def _fix() -> str:
    names = ", ".join(name for _, name in socket.if_nameindex())
    said = " and ".join(f"{name} is {os.environ.get(name)!r}" for name in INTERFACES)
    return f"{said} there; set them to one of {names} that the nodes share, or unset them"


def main() -> None:
    # Whatever hangs, and whoever asked and is gone: a rank does not stay.
    signal.alarm(LIMIT_S)
    seat = Seat(**json.load(sys.stdin))
    listener = int(sys.argv[1]) if len(sys.argv) > 1 else None
    say(sit(seat, listener).to_bytes().decode())


if __name__ == "__main__":
    main()
