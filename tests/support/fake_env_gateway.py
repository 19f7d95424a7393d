"""A fake env_gateway."""

from tests.support.fake_service import run

if __name__ == "__main__":
    run("env_gateway")
