"""Key files for signatures of bundles."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

RFC_8032 = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
"""Secret key of test 1 in section 7.1."""


def pair(folder: Path, name: str, secret: bytes = RFC_8032) -> tuple[Path, Path]:
    """The PEM files of a private key and its public key."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
    places = folder / f"{name}.pem", folder / f"{name}-public.pem"
    places[0].write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    places[1].write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return places
