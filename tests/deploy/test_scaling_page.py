"""The tables of docs/scaling.md match the doctor's computation and today's code."""

import pytest

from flotilla_common.spec.config import canonical_json
from flotilla_launcher.doctor.memory import check_engine_gpu, check_trainer_gpu
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.state import LEARNER, ROLLOUT
from tests.deploy.gpu_lines import GPU_LINES, find_gpu_lines
from tests.deploy.layouts import LAYOUTS, Layout
from tests.deploy.scaling_page import PAGE, write_page


def test_the_page_matches_the_tables_of_today() -> None:
    assert PAGE.read_text() == write_page(), "run `python -m tests.deploy.scaling_page`"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each.spec}-{each.gpu}")
def test_a_layout_fits_into_its_gpus(layout: Layout) -> None:
    trainer, engine = layout.measure_needs()
    found = [
        *check_trainer_gpu(trainer, layout.gpu_bytes, "it"),
        *check_engine_gpu(engine, layout.gpu_bytes, "it"),
    ]
    assert found == []
    gpus = parse_spec(canonical_json(layout.read_spec())).config.gpu_counts()
    assert gpus[LEARNER] in (0, trainer.gpus)
    assert gpus[ROLLOUT] in (0, engine.gpus)


def test_a_line_that_only_a_gpu_reaches_is_listed() -> None:
    listed = {(file, line) for file, lines in GPU_LINES.items() for line in lines}
    assert set(find_gpu_lines()) == listed, "bring tests/deploy/gpu_lines.py up to date"
