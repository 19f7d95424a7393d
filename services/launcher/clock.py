"""The launcher's clock: seconds since the epoch, so that deadlines outlive a launcher, which do not
jump while it lives."""

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    return _EPOCH + time.monotonic()
