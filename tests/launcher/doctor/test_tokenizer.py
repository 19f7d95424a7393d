"""Tokenizers and tasks that would fail a run, and the findings about them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_environments.tasks import make_task
from flotilla_launcher.doctor.findings import Status
from tests.support.doctor import check, emulator, probed, spec, subject


async def test_a_policy_that_is_neither_here_nor_on_the_hub_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "policy.model=missing/no-such-model")
    result = await probed("tokenizer", subject(content, tmp_path))
    check(result, Status.FAIL, "missing/no-such-model is neither a folder", "correct policy.model")


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder, lambda config: config.pop("chat_template", None))


def two_templates(folder: Path) -> None:
    no_template(folder)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    change(folder, lambda config: config.update(chat_template=named))


def another_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    change(folder, lambda config: config.update(chat_template="{{ tools }}{{ messages }}"))


def same_template_twice(folder: Path) -> None:
    another_template(folder)
    change(folder, lambda config: config.update(chat_template="{{ messages }}"))


def token_for_transformers_alone(folder: Path) -> None:
    token = {**added_tokens(folder)[-1], "content": "<|theirs|>"}
    change(folder, lambda config: config.update(added_tokens_decoder={"400": token}))


def token_for_the_learner_alone(folder: Path) -> None:
    """The models' own tokenizer classes add the tokens that the configuration lists, if it does."""
    *listed, lost = added_tokens(folder)
    assert lost["content"] == "<done>"
    decoder = {str(token["id"]): token for token in listed}
    change(folder, lambda config: config.pop("backend"))
    change(
        folder,
        lambda config: config.update(
            tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=decoder
        ),
    )


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "tokenizer.json").read_text())["added_tokens"]


def change(folder: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    how(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (no_template, ("has no chat template", "add a chat_template.jinja")),
        pytest.param(
            two_templates,
            ("several chat templates: default, tool_use", "keep one"),
            marks=pytest.mark.slow,
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), ("has no tokenizer.json",)),
        (token_for_transformers_alone, ("transformers reads '<|theirs|>' as [", "disagree")),
        pytest.param(
            token_for_the_learner_alone,
            ("transformers reads '<done>' as [", "disagree"),
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_tokenizer_that_two_sides_would_load_differently_fails(
    policy: Path, tasks: Path, tmp_path: Path, plant: Callable[[Path], Any], words: tuple[str, ...]
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    plant(folder)
    about = subject(spec(folder, tasks), tmp_path)
    check(await probed("tokenizer", about), Status.FAIL, *words)


@pytest.mark.parametrize(
    ("plant", "status", "words"),
    [
        (
            another_template,
            Status.WARN,
            (
                "tokenizer_config.json has another chat template than chat_template.jinja",
                "keep one: take chat_template out of tokenizer_config.json",
            ),
        ),
        pytest.param(
            same_template_twice,
            Status.OK,
            ("the same tokenizer and chat template",),
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_second_chat_template_is_named_where_it_differs(
    policy: Path,
    tasks: Path,
    tmp_path: Path,
    plant: Callable[[Path], Any],
    status: Status,
    words: tuple[str, ...],
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    plant(folder)
    check(await probed("tokenizer", subject(spec(folder, tasks), tmp_path)), status, *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("learner.tasks:", "there is no such task file", "correct learner.tasks")),
        ([], ("at least one task in it",)),
        ([{"key": "a", "prompt": "b"}], ("task 0 has no key, or no env_id",)),
    ],
)
async def test_a_task_file_that_cannot_be_used_is_named(
    policy: Path, tasks: Path, tmp_path: Path, content: Any, words: tuple[str, ...]
) -> None:
    path = tmp_path / "tasks.json"
    if content is not None:
        path.write_text(json.dumps(content))
    about = subject(spec(policy, path), tmp_path)
    check(await probed("dataset", about), Status.FAIL, *words)


async def test_versions_that_fleet_lacks_are_reported_with_those_that_it_has(
    policy: Path, tmp_path: Path
) -> None:
    known = make_task("booking", "train", 0)
    known["data_version"] = "v0.3"
    served = tmp_path / "served.json"
    served.write_text(json.dumps([known]))
    wanted = [
        {**known, "key": "old", "version": "v0.0.1"},
        {**known, "key": "new", "data_version": "v9"},
        {**make_task("tracker", "train", 0), "key": "gone", "env_id": "teleporter"},
    ]
    path = tmp_path / "wanted.json"
    path.write_text(json.dumps(wanted))
    with emulator("a-key-of-tests", "--tasks", str(served), "--env", "booking") as url:
        backend = ("env_gateway.backend=fleet", f"env_gateway.backends.fleet.url={url}")
        about = subject(spec(policy, path, *backend), tmp_path, FLEET_API_KEY="a-key-of-tests")
        result = await probed("dataset", about)
    check(result, Status.FAIL, "Fleet has no environment teleporter", "correct env_id")
    check(result, Status.FAIL, "Fleet has no version v0.0.1 of booking, but")
    check(result, Status.FAIL, "no task of booking@v9, but of v0.3", "correct data_version")


@pytest.mark.slow
async def test_a_model_without_a_chat_template_may_have_one_of_the_run(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "own.jinja").write_text(config["chat_template"])
    no_template(folder)
    own = f"--rollout.dialect.chat_template={tmp_path / 'own.jinja'}"
    about = subject(spec(folder, tasks, own), tmp_path)
    check(await probed("tokenizer", about), Status.OK, "the same tokenizer")
    check(await probed("dialect", about), Status.OK, "is read as")
