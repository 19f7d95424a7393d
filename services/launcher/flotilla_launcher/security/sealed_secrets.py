"""Sealed secrets for machines: SkyPilot carries the sealed values, the key travels with the
code.

SkyPilot stores a task's secrets in its database and in files. On Slurm it puts them on the
command line of `srun`, which every user of the node can read."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.security.secret_files import write_secret

# In the folder of code that the machines get.
KEY_FILE = ".seal-key"
_MARK = "sealed:"
# Read by SkyPilot itself, such as the password of an image registry.
_OF_SKYPILOT = "SKYPILOT_"


def load_or_make_key(folder: Path) -> bytes:
    """Return the key of the run with this code folder; make it on first use."""
    path = folder / KEY_FILE
    if not path.exists():
        write_secret(path, Fernet.generate_key())
    return path.read_bytes()


def forget_key(folder: Path) -> None:
    """Remove the key, which makes SkyPilot's sealed copies useless."""
    (folder / KEY_FILE).unlink(missing_ok=True)


def seal_secrets(values: Mapping[str, str], key: bytes) -> dict[str, str]:
    """Return the same names with sealed values, which are useless without the key."""
    fernet = Fernet(key)
    return {
        name: value
        if name.startswith(_OF_SKYPILOT)
        else _MARK + fernet.encrypt(value.encode()).decode()
        for name, value in values.items()
    }


def unseal_secrets(environ: MutableMapping[str, str], key_file: Path | None) -> tuple[str, ...]:
    """Open sealed variables in place; return their names. Raises ConfigError if the key is
    missing or belongs to another run."""
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
            f"{names} came sealed, but --seal-key {key_file} cannot be read ({error.strerror}); the"
            " launcher puts it into the code folder of each machine"
        ) from error
    except (InvalidToken, ValueError) as error:
        raise ConfigError(f"{names} came sealed with another key than {key_file}") from error
    environ.update({name: value.decode() for name, value in opened.items()})
    return tuple(opened)
