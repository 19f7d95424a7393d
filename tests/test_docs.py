"""Pages are whole, and the examples under docs/examples do what docs/running.md and
docs/env_gateway.md describe."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.config import ConfigModel, parse_config
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.config.gateway import EnvGatewayConfig, WarmStartsConfig
from flotilla_env_gateway.grading.trusted_verifiers import load_digests
from flotilla_learner.config.learner import LearnerConfig
from flotilla_rollout.config.rollout import RolloutConfig
from tests.support.repository import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def tasks_of(example: str) -> list[dict[str, Any]]:
    return json.loads((EXAMPLES / f"{example}_tasks.json").read_text())["tasks"]


def verifier_of(example: str, task: dict[str, Any], function: str) -> Callable[..., int]:
    """A task's verifier, which may run without a sandbox."""
    source = parse_task(json.dumps(task)).verifier
    assert source is not None
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert digest in load_digests(EXAMPLES / f"{example}_verifiers.sha256")
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope[function]


@pytest.mark.parametrize("example", ["stock", "office"])
def test_every_section_of_the_example_is_valid(example: str) -> None:
    spec = load_spec(EXAMPLES / f"{example}.toml")
    for name, section in (
        ("env_gateway", EnvGatewayConfig),
        ("rollout", RolloutConfig),
        ("learner", LearnerConfig),
    ):
        parse_config(section, spec[name], where=name)


@pytest.mark.parametrize("task", tasks_of("stock"), ids=lambda task: str(task["key"]))
def test_the_verifier_of_each_task_may_run_and_distinguishes_a_pass_from_a_fail(
    task: dict[str, Any],
) -> None:
    looked_up = verifier_of("stock", task, "looked_up")
    item = task["key"].removeprefix("price-")
    shown = json.dumps([{"item": item, "price": 3}])
    for role, content, reward in (("tool", shown, 1), ("tool", "[]", 0), ("assistant", shown, 0)):
        conversation = json.dumps([{"role": role, "content": content}])
        assert looked_up(None, conversation=conversation) == reward


@dataclass
class Office:
    """What a verifier of the office sees through the tools of both servers."""

    letters: dict[str, str]

    def call_tool(self, name: str, item: str = "") -> Any:
        assert (name, item) in {("read_letters", ""), ("find_price", item)}
        return self.letters if name == "read_letters" else 7


@pytest.mark.parametrize("task", tasks_of("office"), ids=lambda task: str(task["key"]))
def test_a_letter_of_the_office_is_graded_by_its_price_and_by_who_gets_it(
    task: dict[str, Any],
) -> None:
    answered = verifier_of("office", task, "answered")
    asking = task["prompt"].split()[0]
    for letters, reward in (
        ({asking: "It costs 7"}, 1),
        ({asking: "It costs 70"}, 0),
        ({"Dan": "It costs 7"}, 0),
        ({}, 0),
    ):
        assert answered(Office(letters)) == reward


def test_the_verifier_of_the_notebook_may_run_without_a_sandbox() -> None:
    digest = hashlib.sha256((EXAMPLES / "notes_verifier.py").read_bytes()).hexdigest()
    assert digest in load_digests(EXAMPLES / "notes_verifiers.sha256")


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_paragraph_ends_in_mid_sentence_or_in_mid_code(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```\s*$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text)]
    assert [block for block in blocks if block.count("`") % 2] == []
    prose = [block for block in blocks if not block.startswith(("#", "|", "<", "!", "["))]
    items = [item for block in prose for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block)]
    # A list may be one sentence, and an item may be code; a link may follow the last sentence.
    ends = re.compile(r"[.:!?][)*\"'”]*$|^- .*[;`]$|[.:!?]\s+\[[^]]*\]\([^)]*\)$", re.DOTALL)
    assert [item for item in items if item and not ends.search(item)] == []


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs/env_gateway.md").read_text()
    section = page.split("\n## From a server to a training step\n")[1].split("\n## ")[0]
    shown = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    verifiers = [task["verifier_func"] for task in tasks_of("office")]
    assert [language for language, _ in shown] == ["toml", "python"]
    assert shown[0][1] in (EXAMPLES / "office.toml").read_text()
    assert shown[1][1] in verifiers


@pytest.mark.parametrize(
    ("table", "model"),
    [("[[env_gateway.servers]]", McpServer), ("[env_gateway.warm_starts]", WarmStartsConfig)],
)
def test_every_key_of_a_table_is_on_the_page_with_its_default(
    table: str, model: type[ConfigModel]
) -> None:
    page = (ROOT / "docs/env_gateway.md").read_text()
    rows = page.split(f"| key of `{table}` | type, default | |\n|---|---|---|\n")[1].split("\n\n")[
        0
    ]
    cells = [row.split(" | ") for row in rows.splitlines()]
    shown = {key.strip("| `"): re.findall("`(.*?)`", kind) for key, kind, *_ in cells}
    fields = model.model_fields.items()
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields}
    assert shown == {
        name: [] if default is None else [json.dumps(default)] for name, default in defaults.items()
    }
