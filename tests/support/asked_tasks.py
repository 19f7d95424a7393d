"""Tasks of an MCP server that ask for a word, whose verifier passes the answer "right"."""

import json
import sys
from hashlib import sha256
from pathlib import Path

from tests.support.repository import ROOT

VERIFIER = """
def said(env, final_answer=None, conversation=None):
    assert "What is" in conversation
    return 1 if final_answer == "right" else 0
"""


def write_asked_tasks(folder: Path, count: int, data_id: str = "notes") -> tuple[Path, Path]:
    """Write a spec and a task file with the tasks ask-0, ask-1, and so on; return both."""
    digest = sha256(VERIFIER.encode()).hexdigest()
    (folder / "said.sha256").write_text(f"{digest}  said\n")
    server = str(ROOT / "tests/support/mcp_stdio_server.py")
    gateway = {
        "backend": "mcp",
        "servers": [{"transport": "stdio", "command": [sys.executable, server]}],
        "verifiers": {"digests": str(folder / "said.sha256")},
    }
    known = {"CURRENT_DATE": "2026-01-31", "LOGGED_IN_NAME": "Ann"}
    task = {"env_id": "notes", "data_id": data_id, "verifier_func": VERIFIER}
    task |= {"env_variables": known}
    spec, tasks = folder / "spec.json", folder / "tasks.json"
    spec.write_text(json.dumps({"env_gateway": gateway}))
    tasks.write_text(
        json.dumps([{**task, "key": f"ask-{n}", "prompt": f"What is {n}?"} for n in range(count)])
    )
    return spec, tasks
