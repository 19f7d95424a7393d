"""One rank of a ring: where it sits, what came of it, and the process that is it."""

import ipaddress
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from services.common import interpreter
from services.launcher.doctor.findings import first_line
from services.launcher.doctor.probe_process import output_of

# All of a rank's life: its imports, waiting for the others, and what gloo and NCCL may take.
LIMIT_S = 75
_MODULE = "services.launcher.doctor.adapters.ring_probe"
_MOST_RANKS = 256
_BY_HAND = "see whether it runs by hand, in an environment made anew by `make`"


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank, among how many, and where rank 0 listens. `gpu` is the one that it takes where GPUs
    are wanted and every rank has one; None for gloo."""

    rank: int
    world: int
    host: str
    port: int
    gpu: int | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a rank: `wrong` is "" where all went well, and else `fix` says how to mend it.

    `blocked` is said of a way that does not exist: what it brings about elsewhere tells nothing.
    """

    wrong: str = ""
    fix: str = ""
    blocked: bool = False
    # "gloo" or "nccl", with what there is to say of it.
    how: str = ""
    torch: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def seat_from(text: bytes) -> Seat:
    """Of a caller elsewhere, which never sits where rank 0 does. Raises ValueError."""
    try:
        seat = Seat(**json.loads(text))
        # Raises for what is no address: no rank looks up a stranger's names.
        ipaddress.ip_address(seat.host)
        if not 0 < seat.rank < seat.world <= _MOST_RANKS or not 0 < seat.port < 2**16:
            raise ValueError("no seat of a ring")
    except TypeError as error:
        raise ValueError(str(error)) from error
    return seat


def outcome_from(text: bytes | str) -> Outcome:
    """Raises ValueError."""
    try:
        return Outcome(**json.loads(text))
    except TypeError as error:
        raise ValueError(str(error)) from error


async def sit(
    python: str, seat: Seat, environ: Mapping[str, str], listener: int | None = None
) -> Outcome:
    """Be a rank, in a process that ends with this call. Rank 0 has the `listener` to hand on."""
    handed: Sequence[int] = () if listener is None else (listener,)
    command = interpreter.python("-m", _MODULE, *map(str, handed), executable=python)
    code, output, errors = await output_of(command, seat.to_bytes(), environ, handed)
    try:
        # Vendors print as well.
        return outcome_from(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        if code == -signal.SIGALRM:
            return Outcome(f"did not come through within {LIMIT_S} s", _BY_HAND)
        last = first_line("\n".join(reversed(errors.strip().splitlines())))
        return Outcome(f"ended with code {code}: {last or 'it said nothing'}", _BY_HAND)
