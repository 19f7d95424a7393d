"""A fake learner whose check of the spec takes for as long as a file is there."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import fake_service


def main() -> None:
    if "--check-config" in sys.argv:
        # The real check reads standard input again.
        text = sys.stdin.read()
        sys.stdin = io.StringIO(text)
        _wait(json.loads(text))
    fake_service.run("learner")


def _wait(spec: dict[str, Any]) -> None:
    hold = Path(spec["learner"]["message"])
    hold.with_suffix(".checking").touch()
    while hold.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
