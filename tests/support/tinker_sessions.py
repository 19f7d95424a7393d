"""The end of sessions that a test leaves open with a Tinker service, such as those of a learner
that it "kills": their heartbeats would warn of the absent service in later tests."""

import gc

from tinker.lib.internal_client_holder import InternalClientHolder


def end_sessions() -> None:
    """Close every session of this process."""
    for found in gc.get_objects():
        if type(found) is InternalClientHolder:
            found.close()
