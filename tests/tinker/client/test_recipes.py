"""The cookbook's recipes run to their end on our server, and learn."""

from pathlib import Path

import pytest

from tests.tinker.client.recipes import RECIPES, Recipe, run_recipe
from tests.tinker.client.served import Served, client_tests
from tests.tinker.client.support_page import read_recipes

pytestmark = client_tests


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all recipes' logs: one reads what another has saved."""
    return tmp_path_factory.mktemp("recipes")


@pytest.mark.parametrize("recipe", [each for each in RECIPES if not each.not_run], ids=str)
def test_a_recipe_learns_or_is_refused_by_name(recipe: Recipe, served: Served, logs: Path) -> None:
    run = run_recipe(recipe, served, logs)
    if recipe.refused:
        assert run.code and recipe.refused in run.refusal
        # At its first sample, before anything is trained.
        assert not run.curve
        return
    assert run.code == 0, run.output[-3000:]
    assert run.learned, run.curve
    assert ("resum" in run.output.lower()) >= recipe.interrupted


def test_the_page_names_every_recipe(stage: Path) -> None:
    assert list(read_recipes()) == [each.name for each in RECIPES]
