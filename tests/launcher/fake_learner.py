"""A fake learner."""

from tests.launcher.fake_service import run

if __name__ == "__main__":
    run("learner")
