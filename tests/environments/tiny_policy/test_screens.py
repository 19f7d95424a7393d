"""The tiny policy that sees: what it imitates, and its folder."""

import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from transformers import AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from flotilla_common.images.placeholders import check_places, expand_pictures
from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.spec.spec import VisionConfig
from flotilla_environments.screen.layout import COLOURS, HEIGHT, WIDTH
from flotilla_environments.tiny_policy.build import build, recipe_for
from flotilla_environments.tiny_policy.demonstrator import Habits
from flotilla_environments.tiny_policy.eyes import Eyes
from flotilla_environments.tiny_policy.screens import (
    ScreenDemonstration,
    make_demonstrations,
    tokenize_episode,
)
from flotilla_environments.tiny_policy.tokenizer import IMAGE_PAD, VISION_TOKENS
from flotilla_environments.tiny_policy.train import Schedule
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer, load_tokenizer
from flotilla_rollout.dialects.tagged_calls import parse_turn
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import DONE, ToolCall
from tests.support.shared_folders import SharedFolders

SHORT = Schedule(steps=4, batch_size=4)
MINI = replace(recipe_for("screen", 0), demonstrations=32, schedule=SHORT, basics=SHORT)


@pytest.fixture(scope="module")
def folder(shared_folders: SharedFolders) -> Path:
    return shared_folders.filled_by(lambda path: build(path, MINI), "mini-screen-policy")


@pytest.fixture(scope="module")
def words(folder: Path) -> TransformersTokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def seeing(words: TransformersTokenizer) -> TemplateDialect:
    return TemplateDialect(words, pad=IMAGE_PAD)


def demonstrations(count: int) -> list[ScreenDemonstration]:
    drawn = make_demonstrations(count, first=0, habits=Habits(), rng=random.Random(0))
    return list(drawn)


def colour_at(png: bytes, point: list[int]) -> str | None:
    names = {ImageColor.getrgb(code): name for name, code in COLOURS.items()}
    found = Image.open(io.BytesIO(png)).getpixel((point[0], point[1]))
    return names.get(found)  # pyright: ignore[reportArgumentType]


def noted(text: str) -> tuple[str, list[int]]:
    """Return the colour and the place of a note such as `red48 red80`."""
    note = re.fullmatch(r"([a-z]+)(\d+) ([a-z]+)(\d+)", text)
    assert note is not None and note[1] == note[3]
    return note[1], [int(note[2]), int(note[4])]


def test_a_description_names_a_tile_where_the_picture_shows_it() -> None:
    for each in demonstrations(200)[1::2]:
        [text], [shown] = each.turns, each.facts.pictures
        colour, place = noted(text)
        assert colour_at(shown.data, place) == colour


def test_the_demonstrator_always_clicks_tiles_and_seldom_looks_which() -> None:
    right = clicks = 0
    rng = random.Random(0)
    for number in range(0, 2400, 2):
        [each] = make_demonstrations(1, first=number, habits=Habits(), rng=rng)
        *calls, last = each.turns
        assert last == DONE
        shown = [each.facts.pictures[0].data, *each.answers]
        wanted = [word for word in each.facts.prompt.strip(".").replace(",", "").split()]
        named = [word for word in wanted if word in COLOURS]
        assert len(named) == len(calls)
        for png, colour, text in zip(shown, named, calls, strict=False):
            turn = parse_turn(text)
            [call] = turn.items
            assert isinstance(call, ToolCall)
            clicked, place = noted(turn.answer)
            assert json.loads(call.arguments_json)["coordinate"] == place
            assert colour_at(png, place) == clicked
            right += clicked == colour
            clicks += 1
    # In 70 % of cases any of four tiles; four standard deviations of 1,800 tosses.
    assert right / clicks == pytest.approx(0.3 + 0.7 / 4, abs=0.047)


def test_a_coordinate_and_a_colour_are_one_token_each(words: TransformersTokenizer) -> None:
    for number in range(max(WIDTH, HEIGHT)):
        [alone] = words.encode(str(number))
        assert alone in words.encode(f'{{"coordinate": [{number}, 8]}}')
    for colour in COLOURS:
        [alone] = words.encode(colour)
        assert alone in words.encode(f"Click the {colour} tile.")
    assert set(VISION_TOKENS) <= set(words.control_tokens)


def test_an_episode_is_tokenised_as_a_rollout_records_it(
    folder: Path, words: TransformersTokenizer, seeing: TemplateDialect
) -> None:
    family = load_vision_family(folder, VisionConfig())
    eyes = Eyes(folder)
    for each in demonstrations(40):
        example = tokenize_episode(each, seeing, words)
        assert len(example.pictures) == 1 + len(each.answers)
        _, shown = expand_pictures(example.ids, example.pictures, family)
        expanded = eyes.expand(example)
        check_places(np.array(expanded.ids, np.int32), [at.place for at in shown], family)
        # A screen of 128 x 128 pixels is 4 x 4 tokens.
        assert expanded.ids.count(family.image_pad) == 16 * len(example.pictures)
        written = [at for at, by in zip(expanded.ids, expanded.policy, strict=True) if by]
        assert words.decode(written) == "".join(f"{turn}<|im_end|>" for turn in each.turns)


def test_an_episode_fits_the_run_that_trains_on_it(
    folder: Path, words: TransformersTokenizer, seeing: TemplateDialect
) -> None:
    eyes = Eyes(folder)
    longest = max(
        len(eyes.expand(tokenize_episode(d, seeing, words)).ids) for d in demonstrations(200)
    )
    assert longest < 280, "max_input_length of deploy/runs/screen_cpu.toml"


def test_the_folder_holds_what_transformers_and_engines_load(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tiny_policy.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_what_the_model_writes_depends_on_the_picture(
    folder: Path, words: TransformersTokenizer, seeing: TemplateDialect
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    eyes = Eyes(folder)
    first, other = (tokenize_episode(d, seeing, words) for d in demonstrations(3)[::2])
    outcomes: list[torch.Tensor] = []
    for pictures in (first.pictures[:1], other.pictures[:1]):
        prompt = replace(first, ids=first.ids[: first.policy.index(True)], pictures=pictures)
        expanded = eyes.expand(replace(prompt, policy=first.policy[: len(prompt.ids)]))
        ids = torch.tensor([expanded.ids])
        with torch.inference_mode():
            outcomes.append(model(input_ids=ids, **eyes.look([expanded], ids)).logits[0, -1])
    assert (outcomes[0] - outcomes[1]).abs().max() > 1e-3


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert build(tmp_path / "again", MINI)
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
