import asyncio
import os
import sys
from pathlib import Path

from services.env_gateway.adapters import child


async def test_python_is_the_interpreter_that_runs_the_gateway_with_its_packages() -> None:
    program = "import sys; print(sys.executable, sys.prefix)"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(child.__file__)), str(os.getpid()), "python", "-c", program),
        env={"PATH": os.defpath},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert output.decode().split() == [sys.executable, sys.prefix]
