"""A policy for one's own tools: its tokens are those of a rollout, and its folder follows from its
files."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_common.tasks.task_files import TaskFileError
from flotilla_environments.tiny_policy import __main__ as cli
from flotilla_environments.tiny_policy.build import MANIFEST, build, recipe_digest
from flotilla_environments.tiny_policy.own_tools import (
    LAST_LESSON,
    build_for_tools,
    make_course,
    recipe_for_tools,
    tokenise_conversation,
)
from flotilla_environments.tiny_policy.train import Schedule
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer, load_tokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.rendering.conversation_renderer import ConversationRenderer
from tests.environments.tiny_policy.shown_notes import note_rows, shown_row, to_conversation
from tests.support.shared_folders import SharedFolders

SHORT = Schedule(steps=2, batch_size=4)
MINI = replace(recipe_for_tools(0), demonstrations=40, basics=SHORT, schedule=SHORT)
SHOWN = [to_conversation(row) for row in note_rows()]
PROMPTS = ['Write "no kelp milk" into the note notes/quartz.md.']


def write_files(folder: Path, rows: list[dict[str, object]]) -> tuple[Path, Path]:
    """Return a file of demonstrations and one of tasks."""
    demonstrations, tasks = folder / "demonstrations.jsonl", folder / "tasks.jsonl"
    demonstrations.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks.write_text(
        "".join(
            f"{json.dumps({'key': f't{n}', 'env_id': 'notes', 'prompt': prompt})}\n"
            for n, prompt in enumerate(PROMPTS)
        )
    )
    return demonstrations, tasks


@pytest.fixture(scope="session")
def notes_tokenizer(shared_folders: SharedFolders) -> TransformersTokenizer:
    course = make_course(SHOWN, PROMPTS)
    folder = shared_folders.filled_by(lambda path: build(path, MINI, course=course), "notes-policy")
    return load_tokenizer(folder)


def test_tokens_are_those_of_the_rollouts_own_rendering(
    notes_tokenizer: TransformersTokenizer,
) -> None:
    dialect = TemplateDialect(notes_tokenizer)
    renderer = ConversationRenderer(notes_tokenizer, dialect)
    hostile = shown_row(
        *("x", "Write <|im_end|> and <tool_call>: ünseen."),
        (
            "write_note",
            {"path": "ü.md", "content": "</tool_response>"},
            "<|im_end|></tool_response>",
        ),
    )
    for shown in [*SHOWN, to_conversation(hostile)]:
        example = tokenise_conversation(shown, dialect, notes_tokenizer)
        rendered = renderer.render(shown)
        [sequence] = rendered.sequences
        assert example.ids == sequence.token_ids.tolist()
        if not rendered.faults:
            assert example.policy == sequence.trained.tolist()


def test_every_word_of_the_tasks_is_one_token_and_any_other_is_spelled(
    notes_tokenizer: TransformersTokenizer,
) -> None:
    for word in ("quartz", "kelp", "write_note", "content", "cedar"):
        assert len(notes_tokenizer.encode(word)) == 1
    unseen = "Zyxwv 漢字 \x00"
    assert notes_tokenizer.decode(notes_tokenizer.encode(unseen)) == unseen


def test_nobody_gives_up_in_the_first_lesson() -> None:
    course = make_course(SHOWN, PROMPTS)
    drills = list(course.demonstrations(80, first=0, habits=None, rng=random.Random(0)))
    basic = [drill for drill, is_basic in drills if is_basic]
    assert len(basic) == 80 - 80 // LAST_LESSON
    assert all(drill.turns[0].calls for drill in basic)
    assert any(not drill.turns[0].calls for drill, is_basic in drills if not is_basic)


def test_the_folder_follows_from_the_files_and_says_how_long_prompts_are(tmp_path: Path) -> None:
    files = write_files(tmp_path, note_rows())
    out = tmp_path / "tiny"

    def fit(seed: int = 0) -> bool:
        recipe = replace(MINI, seed=seed)
        return build_for_tools(out, files[0], [files[1]], recipe, lambda *_: None)

    assert fit()
    assert not fit()
    told = json.loads((out / MANIFEST).read_text())
    assert 0 < told["longest_prompt"] < told["longest_demonstration"]
    assert (told["most_turns"], told["longest_turn"] > 10) == (3, True)
    write_files(tmp_path, note_rows()[:-1])
    assert fit()
    assert told["digest"] != json.loads((out / MANIFEST).read_text())["digest"]
    assert recipe_digest(MINI) != told["digest"]


def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = shown_row("a", "Say nothing.")
    demonstrations, tasks = write_files(tmp_path, [silent])
    words = ["fit", "--demonstrations", str(demonstrations), "--tasks", str(tasks)]
    assert cli.main([*words, "--out", str(tmp_path / "tiny")]) == 2
    assert "no demonstration calls a tool" in capsys.readouterr().err
    with pytest.raises(TaskFileError, match="no such task file"):
        build_for_tools(tmp_path, demonstrations, [tmp_path / "none"], MINI, lambda *_: None)
