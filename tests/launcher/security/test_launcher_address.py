"""The file with the launcher's address."""

import json
from pathlib import Path

from flotilla_launcher.security import launcher_address


def test_the_file_of_a_dead_launcher_counts_for_nothing(tmp_path: Path) -> None:
    assert launcher_address.read_address(tmp_path) is None
    with launcher_address.published_address(tmp_path, "127.0.0.1:1", "token"):
        path = tmp_path / "launcher.json"
        assert path.stat().st_mode & 0o777 == 0o600
        assert launcher_address.read_address(tmp_path) is not None
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "started": 1.0}))
        assert launcher_address.read_address(tmp_path) is None
        path.write_text("{")
        assert launcher_address.read_address(tmp_path) is None
    assert not path.exists()
