"""A fake rollout."""

from tests.support.fake_entry import run_fake

if __name__ == "__main__":
    run_fake("rollout")
