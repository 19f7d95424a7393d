"""A fake rollout."""

from tests.support.fake_service import run

if __name__ == "__main__":
    run("rollout")
