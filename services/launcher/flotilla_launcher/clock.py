"""The launcher's clock: seconds since the epoch, so deadlines survive a launcher restart. It
is monotonic within one process."""

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    return _EPOCH + time.monotonic()
