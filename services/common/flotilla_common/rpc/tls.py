"""Mutual TLS within one run: the certificate that a node presents and demands beyond loopback.

Every run has its own CA, so its certificates identify members of the run. Names are
SERVICE.RUN_ID.flotilla; callers compare the name, not the address, which may be anything."""

import base64
import json
import os
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from flotilla_common.rpc.errors import ConfigError

TLS_VARIABLE = "FLOTILLA_TLS"
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
_MINT = "the launcher hands out a set per run"
# The first match counts. A client is never notified that the server refused its certificate: in
# TLS 1.3 the client's handshake is over by then.
_CAUSES = {
    "Hostname Verification Check failed": (
        "another service of the run answers at this address: the address is wrong"
    ),
    "certificate has expired": "its certificate has expired, or this machine's clock is ahead",
    "certificate is not yet valid": "this machine's clock is behind its certificate",
    "CERTIFICATE_VERIFY_FAILED": "its certificate belongs to another run",
    "WRONG_VERSION_NUMBER": "it speaks plain text: start it with --tls-dir too",
    "Socket closed": (
        "it hung up: it ended, wants TLS (--tls-dir), or refuses our certificate as of another run"
        " or expired; see its log"
    ),
    "Connection refused": "nothing listens there (any more)",
    "No route to host": "the machine is unreachable: check its network and firewall",
    "timed out": "nothing answers there: check for a firewall or a closed port",
}


@dataclass(frozen=True, slots=True)
class Tls:
    """A service's TLS identity in a run: PEM texts, and the name in its certificate."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    name: str

    def name_of(self, service: str) -> str:
        """Return the name in the certificate of another service of the run."""
        return f"{service}.{self.name.partition('.')[2]}"

    def check_is(self, service: str, run_id: str) -> None:
        """Raise ConfigError if the certificate belongs to another service or run."""
        expected = f"{service}.{run_id}.flotilla"
        if self.name != expected:
            raise ConfigError(
                f"the TLS certificate is that of {self.name}, this process is {expected}: pass a"
                " --tls-dir (or FLOTILLA_TLS) that matches --run-id"
            )

    def to_text(self) -> str:
        """Return all of it in one line, the format of FLOTILLA_TLS. It is a secret."""
        parts = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        content = json.dumps({name: pem.decode() for name, pem in parts.items()})
        return base64.b64encode(content.encode()).decode()


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return credentials that present our certificate and accept only those of the run's CA."""
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return credentials that hang up on clients without a certificate of the run."""
    return grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)], root_certificates=tls.ca, require_client_auth=True
    )


def read_tls(folder: Path | None) -> Tls | None:
    """Return checked TLS files of `folder`, else those in FLOTILLA_TLS, else None.

    The variable is removed from the environment, so that no child process inherits it. Raises
    ConfigError."""
    text = os.environ.pop(TLS_VARIABLE, "")
    if folder is not None:
        return _from_folder(folder)
    return from_text(text, where=f"${TLS_VARIABLE}") if text else None


def from_text(text: str, *, where: str) -> Tls:
    """Reverse `to_text`, with checks. Raises ConfigError, which does not repeat the text."""
    try:
        content = json.loads(base64.b64decode(text, validate=True))
        parts = [content[name].encode() for name in ("ca", "certificate", "key")]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{where} is not what Tls.to_text writes (base64 of JSON with ca, certificate and"
            f" key); {_MINT}"
        ) from None
    return _check_parts(*parts, where=where)


def likely_cause(details: str | None) -> str:
    """Return the likely cause behind gRPC's text about a failed connection; "" if unknown."""
    text = details or ""
    return next((cause for sign, cause in _CAUSES.items() if sign in text), "")


def _from_folder(folder: Path) -> Tls:
    parts: list[bytes] = []
    for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
        try:
            parts.append((folder / name).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"--tls-dir {folder}: cannot read {name} ({error.strerror}); the folder holds"
                f" {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}, {_MINT}"
            ) from error
    return _check_parts(*parts, where=f"--tls-dir {folder}")


def _check_parts(ca: bytes, certificate: bytes, key: bytes, *, where: str) -> Tls:
    try:
        shown = _try_handshake(ca, certificate, key)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{where}: {_why_not_valid(error.verify_message)}") from error
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {_why_not_usable(error)}; {_MINT}") from error
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
    if len(names) != 1 or not names[0].endswith(".flotilla"):
        raise ConfigError(
            f"{where}: the certificate names {names or 'nothing'}, not one SERVICE.RUN_ID.flotilla"
        )
    return Tls(ca, certificate, key, names[0])


def _why_not_valid(message: str) -> str:
    if "expired" in message:
        return (
            "the certificate has expired: start a new run or resume this one to get a new one; a"
            " launcher makes one when it starts: copy its launcher.json again then"
        )
    if "not yet valid" in message:
        return "the certificate is not valid yet: this machine's clock is behind; set it"
    return f"the certificate is not of this CA ({message}): all files must be of one run"


def _why_not_usable(error: Exception) -> str:
    reason = getattr(error, "reason", None) or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        return "the key does not match the certificate"
    return f"the files are not usable PEM ({reason})"


def _try_handshake(ca: bytes, certificate: bytes, key: bytes) -> dict[str, Any]:
    """Run a handshake of the certificate with itself in memory, as server and as client.

    A failure here would appear at the first call too, but less clearly. Return the certificate's
    fields."""
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)]
    with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
        for context in contexts:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=ca.decode())
            context.load_cert_chain(certificate_file, key_file)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[0].wrap_bio(back, there)
    server = contexts[1].wrap_bio(there, back, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert() or {}


@contextmanager
def _as_file(content: bytes) -> Generator[str]:
    """Yield a file name for bytes that must not be on a disk: OpenSSL reads certificates from files
    only."""
    descriptor = os.memfd_create("flotilla-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
