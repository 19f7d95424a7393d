"""An environment as docs/env_gateway.md teaches to make one: an MCP server of four tools,
tasks, a verifier, and a run spec beside them."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

SERVER = '''
import json, os, sys
from mcp.server import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("library")
books = {"Emma": "Austen", "Dracula": "Stoker", "Walden": "Thoreau"}
loans = []

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_books(author: str) -> str:
    """The titles of an author."""
    return json.dumps([title for title, by in books.items() if by == author])

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_loans() -> str:
    """What is lent at present."""
    return json.dumps(loans)

@server.tool()
def lend(title: str) -> str:
    """Lend a book."""
    loans.append(title)
    return "lent"

@server.tool()
def give_back(title: str) -> str:
    """Give a book back."""
    loans.remove(title)
    return "given back"

if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
'''

VERIFIER = '''
def lent(env, final_answer=None):
    """Passes when the wanted book, and nothing else, is lent."""
    return 1 if env.call_tool("list_loans") == ["Emma"] else 0
'''

TASKS = [
    {"key": f"lend-{n}", "env_id": "library", "prompt": "Lend the book by Austen."}
    for n in range(3)
]


SPEC = """
name = "library"
[policy]
model = "{policy}"
max_model_len = 8192
[env_gateway]
backend = "mcp"
[env_gateway.verifiers]
digests = "verifiers.sha256"
[rollout]
max_attempts = 4
max_turns = 2
max_input_length = 4000
max_generate_length = 40
[rollout.engine]
device = "cpu"
max_num_seqs = 4
[learner]
tasks = "{folder}/tasks.json"
steps = 1
groups_per_step = 1
group_size = 2
[[env_gateway.servers]]
"""


def write(
    folder: Path,
    policy: Path,
    *,
    backend: str = "",
    verifier: str = VERIFIER,
    server: str = SERVER,
    listed: bool = True,
) -> Path:
    """The spec, with all that it names beside it. `backend` is TOML of the table of the MCP server,
    by default one over stdio."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "server.py").write_text(server)
    (folder / "tasks.json").write_text(
        json.dumps({"tasks": [{**task, "verifier_func": verifier} for task in TASKS]})
    )
    digest = hashlib.sha256(verifier.encode()).hexdigest()
    (folder / "verifiers.sha256").write_text(f"{digest}  lend\n" if listed else "")
    command = json.dumps([sys.executable, f"{folder}/server.py"])
    table = backend or f'transport = "stdio"\ncommand = {command}'
    spec = folder / "library.toml"
    spec.write_text(SPEC.format(policy=policy, folder=folder) + f"{table}\n")
    return spec


def hide_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine one without bubblewrap, for child processes too."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
