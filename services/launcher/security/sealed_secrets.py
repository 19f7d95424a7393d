"""Sealed secrets on their way to a machine: SkyPilot carries them sealed, and the key goes with
the code.

SkyPilot keeps a task's secrets in its database and in files, and on Slurm it writes them on the
command line of `srun`, which every user of the node can read."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from services.common.errors import ConfigError

# In the folder of code that the machines get.
KEY_FILE = ".seal-key"
_MARK = "sealed:"
# Read by SkyPilot itself: the password of a registry of images, for one.
_OF_SKYPILOT = "SKYPILOT_"


def load_or_make_key(folder: Path) -> bytes:
    """Return the key of the run whose code this is, made when it is first asked for."""
    path = folder / KEY_FILE
    if not path.exists():
        draft = path.with_name(f"{KEY_FILE}.draft")
        draft.touch(0o600)
        draft.write_bytes(Fernet.generate_key())
        draft.replace(path)
    return path.read_bytes()


def forget_key(folder: Path) -> None:
    """Remove the key, so that nobody can open what SkyPilot still has."""
    (folder / KEY_FILE).unlink(missing_ok=True)


def seal_secrets(values: Mapping[str, str], key: bytes) -> dict[str, str]:
    """Seal the values: the same names, with values that are worthless without the key."""
    fernet = Fernet(key)
    return {
        name: value if name.startswith(_OF_SKYPILOT) else _MARK + _encrypt_value(fernet, value)
        for name, value in values.items()
    }


def _encrypt_value(fernet: Fernet, value: str) -> str:
    return fernet.encrypt(value.encode()).decode()


def unseal_secrets(environ: MutableMapping[str, str], key_file: Path | None) -> tuple[str, ...]:
    """Open sealed variables in place; return their names. Raises ConfigError if the key is not
    that of the run."""
    sealed = {name: value for name, value in environ.items() if value.startswith(_MARK)}
    if not sealed:
        return ()
    names = ", ".join(sealed)
    if key_file is None:
        raise ConfigError(f"{names} came sealed: pass --seal-key")
    try:
        fernet = Fernet(key_file.read_bytes())
        opened = {name: fernet.decrypt(value[len(_MARK) :]) for name, value in sealed.items()}
    except OSError as error:
        raise ConfigError(
            f"{names} came sealed, and --seal-key {key_file} cannot be read ({error.strerror}); the"
            " launcher puts it into the folder of code that machines get"
        ) from error
    except (InvalidToken, ValueError) as error:
        raise ConfigError(f"{names} came sealed by another key than {key_file}") from error
    environ.update({name: value.decode() for name, value in opened.items()})
    return tuple(opened)
