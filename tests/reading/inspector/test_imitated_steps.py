"""Pages of a run that imitates: what each step imitated, down to the token."""

import json
import zipfile
from collections.abc import Generator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser

from flotilla_common.run_folder.dump_files import rollouts_path
from flotilla_learner.imitation.step_schedule import StepSchedule
from flotilla_learner.types import StepTokens
from flotilla_reading.inspector.adapters.rendering import STATIC, PageRenderer
from flotilla_reading.inspector.adapters.token_texts import load_run_tokenizer
from flotilla_reading.inspector.bundle import BundleMaker
from flotilla_reading.inspector.queries.run_library import RunLibrary
from tests.learner.dumps.dumped_run import IMITATED, PER_STEP, STEPS, imitated_run, setup_of
from tests.reading.inspector.made_runs import run_apart
from tests.reading.inspector.served_pages import (
    AXE,
    ServedPages,
    follow,
    numbers_shown,
    serious_violations,
    serving,
    watched_page,
)
from tests.support.demonstrations import make_demonstrations


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, StepTokens]]:
    """The folder of a run that imitated, named `run`, and the numbers of its tokens by step."""
    folder = tmp_path_factory.mktemp("imitated")
    _, ranks = run_apart(imitated_run(folder, setup_of(folder)))
    policy = {"model": str(folder / "model"), "dtype": "float32", "max_model_len": 128}
    (folder / "run" / "spec.json").write_text(json.dumps({"name": "test", "policy": policy}))
    return folder, ranks.made_tokens


@pytest.fixture
def pages(imitated: tuple[Path, dict[int, StepTokens]]) -> Generator[ServedPages]:
    with serving(imitated[0]) as found:
        yield found


def test_the_page_of_a_step_leads_to_the_numbers_of_each_imitated_token(
    browser: Browser, pages: ServedPages, imitated: tuple[Path, dict[int, StepTokens]]
) -> None:
    place = StepSchedule(IMITATED, PER_STEP, 0).places_of(STEPS)[1]
    wanted, numbers = make_demonstrations(IMITATED)[place], imitated[1][STEPS].logprobs[1]
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(pages.url)
        page.goto(f"{pages.base}/runs/run")
        assert page.get_by_role("columnheader", name="loss", exact=True).is_visible()
        follow(page.get_by_role("link", name=f"Last step: {STEPS}"))
        assert page.get_by_role("row").count() == PER_STEP + 1
        row = page.get_by_role("row").nth(2)
        assert f"run/{wanted.key.group_id}/{wanted.key.attempt_index}/0" in row.inner_text()
        assert f"{-float(np.mean(numbers)):.3f}" in row.inner_text()
        found = serious_violations(page) if AXE.exists() else []
        follow(row.get_by_role("link"))
        page.wait_for_selector("#token-view[data-ready]")
        # Coloured by the trainer's logprob.
        assert page.locator("#track .t[data-b^='s']").count() > 0
        at = int(np.flatnonzero(wanted.trained)[2])
        shown = numbers_shown(page, at)
        assert np.float32(shown["trainer's logprob"]) == numbers[2]
        assert int(shown["id"]) == wanted.token_ids[at] and "logprob" not in shown
        follow(page.get_by_role("link", name="Conversation"))
        assert page.get_by_text(f"imitates run/{wanted.key.group_id}").first.is_visible()
        follow(page.get_by_role("link", name="Numbers"))
        assert page.get_by_role("row").count() > len(wanted.token_ids)
    assert (found, watched.troubles) == ([], [])


def test_a_bundle_has_the_imitated_sequences_of_its_steps(
    browser: Browser, imitated: tuple[Path, dict[int, StepTokens]], tmp_path: Path
) -> None:
    library = RunLibrary(imitated[0], load_run_tokenizer)
    made = BundleMaker(library, PageRenderer().render, STATIC)
    assert made.write(tmp_path / "out.zip", "run", [2])["attempts"] == PER_STEP
    with zipfile.ZipFile(tmp_path / "out.zip") as file:
        file.extractall(tmp_path / "out")
    with watched_page(browser) as watched:
        page = watched.page
        page.goto((tmp_path / "out/run/step-2.html").as_uri())
        follow(page.get_by_role("link", name="sequence 0"))
        page.wait_for_selector("#token-view[data-ready]")
        for link in page.locator("a[href]").all():
            target = urlsplit(page.evaluate("a => a.href", link.element_handle()))
            assert target.scheme == "file" and Path(unquote(target.path)).exists()
    assert watched.troubles == []


def test_a_step_without_a_dump_says_which_are_kept(
    browser: Browser, pages: ServedPages, imitated: tuple[Path, dict[int, StepTokens]]
) -> None:
    rollouts_path(imitated[0] / "run", 1).unlink()
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(pages.url)
        page.goto(f"{pages.base}/runs/run/steps/1")
        assert page.get_by_text("No dump of this step is kept").is_visible()
        answer = page.goto(f"{pages.base}/runs/run/attempts/imitated-1/0/0")
        assert answer is not None and answer.status == 404
        assert page.get_by_text("There is no sequence 0 in the dump of step 1").is_visible()
