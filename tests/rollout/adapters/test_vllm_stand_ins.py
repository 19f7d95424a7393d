import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# As in a process that has loaded a tokenizer before it starts vLLM, which loads processors.
LATE = """
import sys
from transformers import AutoTokenizer
from transformers.models import qwen2_vl
from flotilla_rollout.adapters.vllm_stand_ins import use_stand_ins

print(use_stand_ins() is not None)
from transformers import AutoProcessor

for folder in sys.argv[1:]:
    processor = AutoProcessor.from_pretrained(folder, use_fast=False)
    print(type(processor.image_processor).__name__, type(processor.video_processor).__name__)
"""


@pytest.mark.timeout(280)
def test_processors_are_found_by_a_process_that_has_imported_transformers_before(
    vision_folder: Callable[[str], Path],
) -> None:
    folders = [str(vision_folder(kind)) for kind in ("qwen2_5_vl", "qwen3_vl")]
    # An engine that another test runs in this process puts the stand-ins on this path.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", LATE, *folders]
    ended = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        "True",
        "Qwen2VLImageProcessorPil Qwen2VLVideoProcessor",
        "Qwen2VLImageProcessorPil Qwen3VLVideoProcessor",
    ]
