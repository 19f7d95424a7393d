"""One rank of a ring: joins the others in one torch group, and passes a tensor around.

Its assignment comes from standard input, its outcome goes to standard output. Rank 0 is
given the descriptor of the socket at which the others find it."""

import json
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

from services.common.process.extras import install_command
from services.common.text.printable_text import print_visible
from services.common.weights.network_interfaces import (
    INTERFACE_VARIABLES,
    choose_interface,
    interface_names,
)
from services.launcher.doctor.findings import first_line
from services.launcher.doctor.network_check import (
    find_unreachable,
    listen_on,
    suggest_network_fix,
)
from services.launcher.doctor.ring_rank import LIMIT_S, RankAssignment, RankOutcome

# The other ranks may be importing torch, which is slow from a cold disk.
_STORE_TIMEOUT = timedelta(seconds=50)
_JOIN_TIMEOUT = timedelta(seconds=15)
_ELEMENTS = 1 << 16
_GLOO, _NCCL = "gloo", "nccl"


class _BlockedError(Exception):
    """Raised when another rank cannot be reached."""


def join_ring(assignment: RankAssignment, listener: int | None) -> RankOutcome:
    """Meet the other ranks, try each connection alone, then join the group."""
    version = ""
    try:
        import torch

        version = str(torch.__version__)
        how = _test_ring(assignment, listener)
    except ImportError as error:
        return RankOutcome(str(error), f"{install_command('learner')} there, or `make setup`")
    except _BlockedError as error:
        return RankOutcome(
            str(error), suggest_network_fix(assignment.host), blocked=True, torch=version
        )
    # All backends of torch raise RuntimeError.
    except (RuntimeError, ValueError, OSError) as error:
        return RankOutcome(
            first_line(str(error)) or repr(error), _suggest_interfaces(), torch=version
        )
    return RankOutcome(how=how, torch=version)


def _test_ring(assignment: RankAssignment, listener: int | None) -> str:
    """Return the backend, with a remark if it is not the expected one. Raises _BlockedError, and
    errors of torch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    own = choose_interface(assignment.host)
    if listener is None and (wrong := find_unreachable({0: (assignment.host, assignment.port)})):
        raise _BlockedError(wrong[0])
    store = _open_store(assignment, listener)
    with listen_on(own) as door:
        facts = _exchange_facts(store, assignment, own, door)
        peers = {rank: (fact["host"], fact["port"]) for rank, fact in facts.items()}
        wrong = find_unreachable(
            {rank: at for rank, at in peers.items() if rank != assignment.rank}
        )
        _await_checks(store, assignment)
        if wrong:
            raise _BlockedError(", ".join(wrong))
        without = [str(rank) for rank, fact in sorted(facts.items()) if not fact["gpu"]]
        backend = _NCCL if assignment.gpu is not None and not without else _GLOO
        dist.init_process_group(
            backend,
            store=store,
            rank=assignment.rank,
            world_size=assignment.world,
            timeout=_JOIN_TIMEOUT,
        )
        _pass_around(assignment, backend)
        dist.destroy_process_group()
    if assignment.gpu is None or backend == _NCCL:
        return backend
    return f"{backend}, not {_NCCL}, for no GPU is seen by rank {', '.join(without)}"


def _open_store(assignment: RankAssignment, listener: int | None) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(
        assignment.host,
        assignment.port,
        is_master=listener is not None,
        master_listen_fd=listener,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
    )


def _exchange_facts(
    store: Any, assignment: RankAssignment, own: str, door: socket.socket
) -> dict[int, dict[str, Any]]:
    """Publish this rank's facts and return those of all ranks, once all have."""
    import torch

    has_gpu = assignment.gpu is not None and torch.cuda.device_count() > assignment.gpu
    fact = {"host": own, "port": door.getsockname()[1], "gpu": has_gpu}
    store.set(f"rank {assignment.rank}", json.dumps(fact))
    return {rank: json.loads(store.get(f"rank {rank}")) for rank in range(assignment.world)}


def _await_checks(store: Any, assignment: RankAssignment) -> None:
    """Wait until every rank has tried to reach the others.

    A rank that ended before would close its door to those that try it last."""
    store.set(f"checked {assignment.rank}", "")
    store.wait([f"checked {rank}" for rank in range(assignment.world)])


def _pass_around(assignment: RankAssignment, backend: str) -> None:
    """Receive from the previous rank, send to the next, then add up over all ranks."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", assignment.gpu or 0) if backend == _NCCL else None
    given = torch.full((_ELEMENTS,), float(assignment.rank), device=device)
    taken = torch.empty_like(given)
    following = (assignment.rank + 1) % assignment.world
    before = (assignment.rank - 1) % assignment.world
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, given, following), dist.P2POp(dist.irecv, taken, before)]
    ):
        work.wait()
    if not bool((taken == float(before)).all()):
        raise ValueError(f"got other numbers than rank {before} sent")
    dist.all_reduce(given)
    if not bool((given == float(sum(range(assignment.world)))).all()):
        raise ValueError("the sum over all ranks is wrong")


def _suggest_interfaces() -> str:
    names = ", ".join(interface_names())
    values = " and ".join(f"{name} is {os.environ.get(name)!r}" for name in INTERFACE_VARIABLES)
    return f"{values} there; set them to one of {names} that the nodes share, or unset them"


def main() -> None:
    # A rank never outlives its limit, even if it hangs or its caller is gone.
    signal.alarm(LIMIT_S)
    assignment = RankAssignment(**json.load(sys.stdin))
    listener = int(sys.argv[1]) if len(sys.argv) > 1 else None
    print_visible(join_ring(assignment, listener).to_bytes().decode())


if __name__ == "__main__":
    main()
