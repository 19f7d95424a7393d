import socket
import ssl
from pathlib import Path

import httpx
import pytest

from services.common.rpc.errors import ConfigError
from services.launcher.security.certificates import RunCertificates
from services.tinker.api.adapters.http_server import ServerSettings, serving_http
from services.tinker.api.calls import Front
from services.tinker.api.keys import ClientKeys
from services.tinker.api.known_facts import KnownFacts
from tests.support.fake_desk import FakeDesk
