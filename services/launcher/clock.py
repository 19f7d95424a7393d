"""The launcher's clock: seconds since the epoch, so that deadlines outlive a launcher. It
does not jump while the launcher lives."""

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    return _EPOCH + time.monotonic()
