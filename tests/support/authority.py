"""A certificate authority of a test's own."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for servers and clients."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = directory / f"{name}.pem"
        certificate = self._signed(self._name, self._key, is_authority=True)
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _signed(
        self, subject: x509.Name, key: Any, is_authority: bool = False, addresses: str = "127.0.0.1", days: int = 1
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=9))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )  # fmt: skip
        if not is_authority:
            names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses.split(",")]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, name: str, addresses: str = "127.0.0.1", days: int = 1) -> Path:
        """Make a file with a certificate for this common name and these addresses, separated by commas, and its key. It
        is valid for so many days more, or has not been for so many."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key, addresses=addresses, days=days)
        file = self.directory / f"{name}-issued.pem"
        file.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return file
