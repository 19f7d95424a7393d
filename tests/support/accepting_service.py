"""Checks a spec like a service, at once: refuses with the text under `[learner] refuse`."""

import json
import sys

if __name__ == "__main__":
    assert sys.argv[sys.argv.index("--config") + 1] == "-", "a spec to check is on standard input"
    refusal = json.load(sys.stdin).get("learner", {}).get("refuse")
    if refusal:
        sys.exit(f"error: learner.{refusal}")
