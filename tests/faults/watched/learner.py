"""The learner on machines of its own."""

from tests.faults.watched import watch

if __name__ == "__main__":
    watch("learner", "flotilla_learner")
