"""Signatures of bundles: Ed25519 (RFC 8032) of ``manifest.json``, which holds the SHA-256 of every other file.

The signature is the file ``manifest.sig``, 64 bytes. Keys are PEM files as OpenSSL writes them: a private key by
``openssl genpkey -algorithm ed25519 -out key.pem``, its public key by ``openssl pkey -in key.pem -pubout -out
public.pem``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trtdet.errors import BundleError, ConfigError
from trtdet.files import write_atomically

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "manifest.sig"
_LARGEST = 1 << 16


def written_signature(folder: Path, manifest: bytes, key: Path) -> Path:
    """Signs the bytes of a manifest with the private key of a PEM file, into the bundle's folder.

    Raises:
        ConfigError: ``cryptography`` is not installed, or the file is not a private Ed25519 key without a password.
        OutputError: the signature cannot be written.
    """
    place = folder / SIGNATURE
    write_atomically(place, _private(key).sign(manifest))
    return place


def check_signature(folder: Path, manifest: bytes, key: Path) -> None:
    """Compares the signature in a bundle's folder with the bytes of its manifest and the public key of a PEM file.

    Raises:
        ConfigError: ``cryptography`` is not installed, or the file is not a public Ed25519 key.
        BundleError: there is no signature, or it is not this key's of this manifest.
    """
    public = _public(key)
    from cryptography.exceptions import InvalidSignature

    try:
        signature = _read(folder / SIGNATURE)
    except FileNotFoundError:
        raise BundleError(f"bundle '{folder}' is not signed; sign it with 'trtdet sign'") from None
    except OSError as error:
        raise BundleError(f"'{folder / SIGNATURE}' cannot be read: {error.strerror or error}; check the file") from None
    try:
        public.verify(signature, manifest)
    except InvalidSignature:
        raise BundleError(
            f"bundle '{folder}' is not signed by the key of '{key}', or was altered afterwards",
            "do not run it; get it again from whoever signed it",
        ) from None


def _private(path: Path) -> Ed25519PrivateKey:
    with _needed():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        key = load_pem_private_key(_pem(path), password=None)
        if isinstance(key, Ed25519PrivateKey):
            return key
    raise ConfigError(
        f"'{path}' is not a private Ed25519 key in PEM without a password",
        f"make one: openssl genpkey -algorithm ed25519 -out {path.name}",
    )


def _public(path: Path) -> Ed25519PublicKey:
    with _needed():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        key = load_pem_public_key(_pem(path))
        if isinstance(key, Ed25519PublicKey):
            return key
    raise ConfigError(
        f"'{path}' is not a public Ed25519 key in PEM",
        "write it from the private key: openssl pkey -in key.pem -pubout -out public.pem",
    )


def _pem(path: Path) -> bytes:
    try:
        return _read(path)
    except OSError as error:
        raise ConfigError(f"the key '{path}' cannot be read: {error.strerror or error}") from None


def _read(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_LARGEST)


@contextmanager
def _needed() -> Iterator[None]:
    """For imports of ``cryptography``: says how it is installed."""
    try:
        yield
    except ImportError:
        raise ConfigError(
            "signatures need the package cryptography, which is not installed", "pip install 'trtdet[sign]'"
        ) from None
