"""A box with SkyPilot's API server and an emulated cloud: all that a test of it needs."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Self

from tests.sky.box import Box, Layout
from tests.sky.box.layout import LOGIN
from tests.sky.box.namespaces import entered
from tests.sky.cloud_client import Cloud
from tests.sky.offline import environment, write_home
from tests.sky.server import ApiServer


class SkySession:
    """Started by `with`; nothing of it is left afterwards, or leaving the block raises."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        self.box = Box(self.layout)
        self.cloud = Cloud(self.layout)
        self.api = ApiServer(self.layout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        try:
            self.box.start()
            write_home(self.layout)
            self.cloud.start()
            self.api.start()
        except BaseException:
            # Ctrl-C too: the processes that run by now would stay without an owner.
            self.stop()
            raise

    def stop(self) -> None:
        self.cloud.stop()
        # The rest is processes in the box's namespaces, which end with it.
        self.box.stop()
        self.api.forget()

    @contextmanager
    def inside(self) -> Generator[None]:
        """Be a process of the login host: its network, and the environment that SkyPilot needs."""
        before = dict(os.environ)
        os.environ.update(environment(self.layout))
        try:
            with entered(self.layout.namespace(LOGIN)):
                yield
        finally:
            os.environ.clear()
            os.environ.update(before)
