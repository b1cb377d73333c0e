"""Keys and certificates: a key pair per site and one for orders; an authority and a certificate for Flower's server.

Sites are known by their public keys, which are registered with the coordinator, and know the coordinator's by their
enrolment. (FLARE makes its certificates itself.) Private keys are born with owner-only permissions.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcomposite._faults import UserError

DAYS_AUTHORITY, DAYS_SERVER = 3650, 825
"""For how long certificates are good."""


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read; an existing one is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _key() -> ec.EllipticCurvePrivateKey:
    # P-256: every order and report is signed, and larger curves are ten times slower to check.
    return ec.generate_private_key(ec.SECP256R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _start(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of the sites may be late
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
    )


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def make_authority(folder: Path, name: str = "fedcomposite federation") -> None:
    """Write ``ca.crt`` and ``ca.key``."""
    key = _key()
    write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(_vouch(key, name))


def _vouch(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """An authority's certificate of itself."""
    certificate = (
        _start(name, name, key.public_key(), key.public_key(), DAYS_AUTHORITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _common(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string().removeprefix("CN=")


def make_server_certificate(authority: Path, folder: Path, host: str, days: int | None = None) -> None:
    """Write ``server.pem`` and ``server.key`` for a host, an address or a name, and for the machine itself."""
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    signer = read_private(authority / "ca.key")
    names = list(dict.fromkeys([host, "localhost", "127.0.0.1", "::1"]))
    key = _key()
    certificate = (
        _start(host, _common(issuer), key.public_key(), signer.public_key(), DAYS_SERVER if days is None else days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), critical=False)
        .sign(signer, hashes.SHA256())
    )  # fmt: skip
    write_private(folder / "server.key", _pem(key))
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def make_site_key(path: Path) -> bytes:
    """Write a site's private key in OpenSSH's format; returns the public one."""
    key = _key()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_private(path, private)
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def request(path: Path, name: str) -> bytes:
    """A certificate request: a site's name and public key, signed with the private one."""
    made = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(read_private(path), hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def read_request(path: Path) -> tuple[str, bytes]:
    """The name and the public key in a request whose sender has the private key."""
    try:
        made = x509.load_pem_x509_csr(path.read_bytes())
        name = str(made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        key = made.public_key()
        good = made.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey)
    except (ValueError, OSError, IndexError) as error:
        raise UserError(f"{path}: not a readable request ({error})") from None
    if not good or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise UserError(f"{path}: the request is not signed with the P-256 key that it names")
    return name, key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def fingerprint(public: ec.EllipticCurvePublicKey) -> str:
    """What two people compare on the telephone."""
    raw = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    found = hashlib.sha256(raw).hexdigest()[:40]
    return " ".join(found[i : i + 4] for i in range(0, 40, 4))


def read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key, a site's or the one of the orders."""
    try:
        content = path.read_bytes()
        ssh = content.startswith(b"-----BEGIN OPENSSH")
        key = (serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key)(content, None)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not a readable private key ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: not an elliptic-curve key")
    return key


def make_order_key(path: Path) -> None:
    """Write the key with which the coordinator signs orders."""
    write_private(path, _pem(_key()))


def public_part(path: Path) -> bytes:
    """The public part of that key, for the sites."""
    public = read_private(path).public_key()
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def read_public(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key."""
    try:
        content = path.read_bytes()
        ssh = content.startswith(b"ecdsa-")
        key = (serialization.load_ssh_public_key if ssh else serialization.load_pem_public_key)(content)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not a readable public key ({error})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path}: not an elliptic-curve key")
    return key


def common_name(path: Path) -> str:
    """Whose certificate this is."""
    subject = x509.load_pem_x509_certificate(path.read_bytes()).subject
    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def days_left(path: Path) -> float:
    """Days until a certificate expires."""
    until = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return (until - datetime.now(UTC)).total_seconds() / 86400
