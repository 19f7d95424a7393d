"""One rank of a ring: its assignment, its outcome, and the process that runs it."""

import ipaddress
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from services.common.process import python_command
from services.launcher.doctor.findings import last_line
from services.launcher.doctor.probe_process import run_command

# Limit of a rank's life: imports, waiting for the others, gloo or NCCL.
LIMIT_S = 75
_MODULE = "services.launcher.doctor.adapters.ring_probe"
_MOST_RANKS = 256
_BY_HAND = "run it by hand, in an environment rebuilt by `make`"


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A rank, the size of its ring, and where rank 0 listens. `gpu` is the one it uses if GPUs
    are wanted and every rank has one; None for gloo."""

    rank: int
    world: int
    host: str
    port: int
    gpu: int | None = None

    def to_bytes(self) -> bytes:
        return _ASSIGNMENT.dump_json(self)


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """Outcome of a rank: `wrong` is "" on success; otherwise `fix` corrects it.

    `blocked` marks a connection that cannot be made, and causes errors of other ranks."""

    wrong: str = ""
    fix: str = ""
    blocked: bool = False
    # "gloo" or "nccl", with a remark if it is not the expected one.
    how: str = ""
    torch: str = ""

    def to_bytes(self) -> bytes:
        return _OUTCOME.dump_json(self)


_ASSIGNMENT, _OUTCOME = TypeAdapter(RankAssignment), TypeAdapter(RankOutcome)


def parse_assignment(text: bytes) -> RankAssignment:
    """Parse the assignment sent by a remote caller, which never takes rank 0 itself. Raises
    ValueError."""
    assignment = _ASSIGNMENT.validate_json(text, strict=True, extra="forbid")
    # Raises for what is no address: no rank looks up a stranger's names.
    ipaddress.ip_address(assignment.host)
    if not 0 < assignment.rank < assignment.world <= _MOST_RANKS or not 0 < assignment.port < 2**16:
        raise ValueError("no seat of a ring")
    return assignment


def parse_outcome(text: bytes | str) -> RankOutcome:
    """Parse an outcome. Raises ValueError."""
    return _OUTCOME.validate_json(text, strict=True, extra="forbid")


async def run_rank(
    python: str, assignment: RankAssignment, environ: Mapping[str, str], listener: int | None = None
) -> RankOutcome:
    """Run a rank in a process that ends with this call. Rank 0 passes its `listener` on."""
    handed: Sequence[int] = () if listener is None else (listener,)
    command = python_command.python_command("-m", _MODULE, *map(str, handed), executable=python)
    code, output, errors = await run_command(command, assignment.to_bytes(), environ, handed)
    try:
        # Vendors print as well.
        return parse_outcome(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        if code == -signal.SIGALRM:
            return RankOutcome(f"did not come through within {LIMIT_S} s", _BY_HAND)
        last = last_line(errors) or "it printed nothing"
        return RankOutcome(f"ended with code {code}: {last}", _BY_HAND)
