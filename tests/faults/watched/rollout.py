"""The rollout service with the small engine on machines of its own."""

from tests.faults.harness import ROLLOUT
from tests.faults.watched import watch

if __name__ == "__main__":
    watch("rollout", ROLLOUT)
