"""The tables of docs/tinker.md: `make tinker-page` calls every method and runs every recipe.

It takes about 10 minutes on 2 cores."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.repository import ROOT
from tests.tinker.client.methods import METHODS, NOT_OURS, call_method, make_world
from tests.tinker.client.recipes import RECIPES, Recipe, RecipeRun, run_recipe
from tests.tinker.client.served import client_of, serving, tinker
from tests.tinker.client.stage import find_stage

PAGE = ROOT / "docs/tinker.md"
_BLOCK = "<!-- {0} -->\n{1}<!-- end of {0} -->\n"
_ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.MULTILINE)
_YES = "yes"
_LONGEST = 240


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with serving(find_stage(), place / "server") as served:
            with client_of(served) as client:
                rest = tinker.RestClient(base_url=served.url, api_key=served.key)
                world = make_world(client, rest)
                methods = {name: call_method(name, world) for name in METHODS}
            _write("methods", method_lines(methods))
            runs: list[RecipeRun] = []
            for each in RECIPES:
                if not each.not_run:
                    runs.append(run_recipe(each, served, place))
                    print(f"{each.name}: {_show(runs[-1])}", flush=True)
            _write("recipes", recipe_lines(runs))


def _write(name: str, lines: Sequence[str]) -> None:
    """Replace a table of the page."""
    page = PAGE.read_text()
    block = _BLOCK.format(name, "".join(f"{line}\n" for line in lines))
    pattern = _BLOCK.format(name, "(?:.*\n)*?")
    assert len(re.findall(pattern, page)) == 1, f"the page has no place for {name}"
    PAGE.write_text(re.sub(pattern, lambda _: block, page))


def read_block(name: str) -> str:
    """Return a table of the page."""
    found = re.search(_BLOCK.format(name, "((?:.*\n)*?)"), PAGE.read_text())
    assert found is not None
    return found[1]


def read_methods() -> dict[str, str]:
    """Return why each method is refused, by the page; "" for one that works."""
    return {
        name: "" if said == _YES else said for name, said in _ROW.findall(read_block("methods"))
    }


def read_recipes() -> dict[str, str]:
    """Return what the page says about each recipe."""
    return dict(_ROW.findall(read_block("recipes")))


def method_lines(reasons: Mapping[str, str]) -> list[str]:
    rows = [f"| `{name}` | {reason or _YES} |" for name, reason in reasons.items()]
    others = ", ".join(f"`{name.partition('.')[2]}`" for name in sorted(NOT_OURS))
    return ["| method | works, or the refusal |", "|---|---|", *rows, "", f"Not offered: {others}."]


def recipe_lines(runs: Sequence[RecipeRun]) -> list[str]:
    shown = {run.recipe.name: _show(run) for run in runs}
    rows = [f"| `{each.name}` | {shown.get(each.name) or each.not_run} |" for each in RECIPES]
    return ["| recipe | what happened |", "|---|---|", *rows, *_flag_lines(RECIPES)]


def _show(run: RecipeRun) -> str:
    recipe = run.recipe
    if run.code:
        return f"refused: {run.refusal[:_LONGEST]}"
    curve = f"`{recipe.metric}` {run.curve[0]:.2f} to {run.curve[-1]:.2f}"
    again = "interrupted after a checkpoint and resumed; " if recipe.interrupted else ""
    return f"ran to its end; {again}{curve} in {len(run.curve)} steps, {run.seconds:.0f} s"


def _flag_lines(recipes: Sequence[Recipe]) -> Iterator[str]:
    yield from ("", "Flags, besides `model_name` and `log_path`:", "", "```")
    for recipe in recipes:
        if not recipe.not_run:
            yield f"{recipe.module}: {' '.join(recipe.flags)}"
    yield "```"


if __name__ == "__main__":
    main()
