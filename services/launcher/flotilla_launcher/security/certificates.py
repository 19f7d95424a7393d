"""Identities in a run: its token, its CA, and a certificate for each of its services.

The CA's key is discarded after signing, so no member can be added to a run later, not even
with access to the stored files. They lie in runs/.identity/RUN_ID/, readable by their owner
alone. The launcher has an identity of its own for its clients."""

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Tls
from flotilla_common.telemetry import log
from flotilla_launcher.security.secret_files import write_secret, write_tls
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT

LAUNCHER = "launcher"
CLIENT = "client"
MEMBERS = (LAUNCHER, GATEWAY, LEARNER, ROLLOUT)
VALIDITY = timedelta(days=60)
# No run id begins with an underscore, so cleanup cannot mistake this for a run's remains.
LAUNCHER_ID = "_launcher"
# Minimum validity left when a launcher starts. Its certificate is not renewed while it serves; an
# expired one would lock out the clients of longer runs.
_LEFT = timedelta(days=30)
# Tolerance for machines whose clocks are behind.
_SKEW = timedelta(minutes=5)
_FOLDER = ".identity"
_TOKEN_FILE = "token"
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Credentials by which a run's processes authenticate each other; `members` holds one Tls
    per service."""

    run_id: str
    token: str = field(repr=False)
    members: Mapping[str, Tls]

    def tls_for(self, service: str) -> Tls:
        """Return the Tls of `service`, to pass as files by --tls-dir or as `to_text()` in
        FLOTILLA_TLS."""
        return self.members[service]


def mint_identity(
    run_id: str, services: Sequence[str] = MEMBERS, *, now: datetime | None = None
) -> RunIdentity:
    """Mint a new identity without storing it."""
    authority = _Authority(run_id, now or datetime.now(UTC))
    members = {service: authority.issue_member(service) for service in services}
    return RunIdentity(run_id, secrets.token_urlsafe(32), members)


def load_launcher_identity(runs: Path, *, now: datetime | None = None) -> RunIdentity:
    """Return the identity of the launcher and of its clients, who hold it in launcher.json: the
    stored one, or a new one if there is none or it expires soon.

    Only the holder of the folder's lock may call this. Raises ConfigError."""
    now = now or datetime.now(UTC)
    try:
        known = load_identity(runs, LAUNCHER_ID)
        if known is not None and _earliest_expiry(known) - now >= _LEFT:
            return known
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot read the launcher's identity: {error}. Remove"
            f" {identity_folder(runs, LAUNCHER_ID)}, restart the launcher, and replace all copies"
            " of runs/launcher.json"
        ) from error
    minted = mint_identity(LAUNCHER_ID, (LAUNCHER, CLIENT), now=now)
    store_identity(runs, minted)
    _log.info("new certificates: copy launcher.json again", until=f"{now + VALIDITY:%Y-%m-%d}")
    return minted


def store_identity(runs: Path, identity: RunIdentity) -> None:
    """Store an identity atomically."""
    place = identity_folder(runs, identity.run_id)
    draft = place.with_name(f".{identity.run_id}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    draft.mkdir(mode=0o700)
    write_secret(draft / _TOKEN_FILE, identity.token.encode())
    for service, tls in identity.members.items():
        member = draft / service
        member.mkdir(mode=0o700)
        write_tls(member, tls)
    shutil.rmtree(place, ignore_errors=True)
    draft.rename(place)


def load_identity(runs: Path, run_id: str) -> RunIdentity | None:
    """Return the stored identity of a run; None if there is none."""
    place = identity_folder(runs, run_id)
    try:
        token = (place / _TOKEN_FILE).read_text()
    except FileNotFoundError:
        return None
    folders = sorted(path for path in place.iterdir() if path.is_dir())
    members = {folder.name: _read_member(folder, run_id) for folder in folders}
    return RunIdentity(run_id, token, members)


def find_identities(runs: Path) -> list[tuple[str, Path]]:
    """List the runs under way and their identity folders, the latest start or resume first."""
    found = [path for path in (runs / _FOLDER).glob("[!._]*") if (path / _TOKEN_FILE).exists()]
    return [(path.name, path) for path in sorted(found, key=_changed_at, reverse=True)]


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def remove_identity(runs: Path, run_id: str) -> None:
    """Remove the identity of a run whose processes are all gone. Idempotent."""
    shutil.rmtree(identity_folder(runs, run_id), ignore_errors=True)


def identity_folder(runs: Path, run_id: str) -> Path:
    """Return the folder of an identity; its subfolder of a service can be a --tls-dir."""
    return runs / _FOLDER / run_id


def _earliest_expiry(identity: RunIdentity) -> datetime:
    """Return the earliest expiry of the identity's certificates. Raises ValueError for an
    invalid certificate, KeyError for a missing one."""
    shown = (identity.tls_for(member).certificate for member in (LAUNCHER, CLIENT))
    return min(x509.load_pem_x509_certificate(each).not_valid_after_utc for each in shown)


def _read_member(folder: Path, run_id: str) -> Tls:
    texts = [(folder / name).read_bytes() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
    return Tls(*texts, name=_member_name(folder.name, run_id))


def _member_name(service: str, run_id: str) -> str:
    return f"{service}.{run_id}.flotilla"


class _Authority:
    """CA that lives while one run is minted. P-256: gRPC's TLS rejects Ed25519 certificates."""

    def __init__(self, run_id: str, now: datetime) -> None:
        self._run_id = run_id
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        # X.509 limits common names to 64 characters; run ids may be longer. It is never compared.
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "flotilla run CA")])
        authority = self._start_certificate(self._subject, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._certificate = authority.add_extension(_key_usage(signs=True), critical=True).sign(
            self._key, SHA256()
        )

    def issue_member(self, service: str) -> Tls:
        """Issue a certificate for both server and client use."""
        key, name = ec.generate_private_key(ec.SECP256R1()), _member_name(service, self._run_id)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, service)])
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._start_certificate(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .sign(self._key, SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Tls(
            self._certificate.public_bytes(Encoding.PEM),
            certificate.public_bytes(Encoding.PEM),
            private,
            name,
        )

    def _start_certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        identifier = x509.SubjectKeyIdentifier.from_public_key(key)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _SKEW)
            .not_valid_after(self._now + VALIDITY)
            .add_extension(identifier, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
