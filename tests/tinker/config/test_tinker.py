from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import parse_shared
from flotilla_tinker.config.tinker import TinkerConfig

SHARED = parse_shared({"name": "x", "policy": {"model": "m", "max_model_len": 8}}, where="spec")


def _parse(**section: Any) -> TinkerConfig:
    given = {"keys": {"alice": "$ALICE_KEY"}, **section}
    return parse_config(TinkerConfig, given, where="spec", section="tinker")


def test_only_keys_are_required() -> None:
    config = _parse()

    assert config.listen == "127.0.0.1:8700"
    assert config.keys == {"alice": "$ALICE_KEY"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"keys": {}}, r"tinker\.keys"),
        ({"keys": {"alice": "tml-secret-in-the-spec"}}, r'alice = "\$TINKER_API_KEY"'),
        ({"keys": {"Al ice": "$KEY"}}, "use up to 63"),
        ({"listen": "0.0.0.0:8700"}, r"tinker\.listen: .*set tinker\.tls\.certificate"),
        ({"listen": "8700"}, r"tinker\.listen: .*write host:port"),
        ({"limits": {"body_bytes": 1}}, r"tinker\.limits\.body_bytes"),
        ({"retention": {"byte": 1}}, r"did you mean 'bytes'"),
    ],
)
def test_a_mistake_is_named_with_its_fix(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _parse(**section)
    assert "tml-secret" not in str(caught.value)


def test_beyond_loopback_its_certificate_must_exist(tmp_path: Path) -> None:
    files = {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    config = _parse(listen="0.0.0.0:8700", tls=files)

    with pytest.raises(ConfigError, match=r"tinker\.tls: there is no file .*cert\.pem"):
        config.check(SHARED)
    for path in files.values():
        Path(path).touch()
    config.check(SHARED)
