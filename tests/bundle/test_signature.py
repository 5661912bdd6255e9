"""Signed bundles: Ed25519 over the manifest, which holds the hash of every file."""

import json
import shutil
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from signing import pair
from test_bundle import make

from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.errors import BundleError, ConfigError
from trtdet.runtime.detector import Detector

SPKI = PublicFormat.SubjectPublicKeyInfo


@pytest.fixture
def signed(tmp_path):
    """A signed bundle, its private and its public key."""
    make(tmp_path / "bundle")
    private, public = pair(tmp_path, "key")
    assert main(["sign", str(tmp_path / "bundle"), "--key", str(private)]) == 0
    return tmp_path / "bundle", private, public


def test_a_signed_bundle_is_verified_by_its_public_key(signed, capsys):
    folder, private, public = signed
    assert len((folder / "manifest.sig").read_bytes()) == 64
    assert Bundle(folder, public_key=public).manifest == Bundle(folder).manifest
    assert main(["sign", str(folder), "--key", str(private)]) == 0
    assert f"signed 2 files of {folder}: wrote {folder / 'manifest.sig'}" in capsys.readouterr().out
    assert main(["verify", str(folder), "--key", str(public)]) == 0
    assert f"is whole: 2 files as the manifest has them; signed by the key of {public}" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0
    assert "give --key" in capsys.readouterr().out
    for key in (["--key", str(public)], []):
        assert main(["verify", str(folder), "--json", *key]) == 0
        assert json.loads(capsys.readouterr().out) == {"bundle": str(folder), "files": 2, "signed": bool(key)}
    before = (folder / "manifest.sig").read_bytes()
    assert Bundle(folder).sign(private) == folder / "manifest.sig"
    assert (folder / "manifest.sig").read_bytes() == before, "Ed25519 is deterministic"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_openssl_verifies_the_signature(signed):
    folder, _, public = signed
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", folder / "manifest.json"]
    done = subprocess.run(
        [*map(str, command), "-sigfile", str(folder / "manifest.sig")], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Signature Verified Successfully" in done.stdout


def test_what_was_altered_after_signing_is_refused(signed, tmp_path):
    folder, private, public = signed
    other = pair(tmp_path, "other", bytes(32))[1]
    with pytest.raises(
        BundleError, match="is not signed by the key of '.*other-public.pem', or was altered afterwards"
    ):
        Bundle(folder, public_key=other)
    manifest = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(manifest.replace(b'"mine"', b'"ours"'))
    assert Bundle(folder).manifest.model.name == "ours"
    with pytest.raises(BundleError, match="or was altered afterwards; do not run it"):
        Bundle(folder, public_key=public)
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "model.engine").write_bytes(b"another")
    with pytest.raises(BundleError, match="'model.engine' was altered"):
        Bundle(folder, public_key=public)
    (folder / "model.engine").write_bytes(b"engine")
    Bundle(folder).add("extra.txt", b"more")
    with pytest.raises(BundleError, match="or was altered afterwards"):
        Bundle(folder, public_key=public)
    Bundle(folder).sign(private)
    assert Bundle(folder, public_key=public).file("extra.txt").read_bytes() == b"more"
    for cut in (b"", (folder / "manifest.sig").read_bytes()[:-1]):
        (folder / "manifest.sig").write_bytes(cut)
        with pytest.raises(BundleError, match="or was altered afterwards"):
            Bundle(folder, public_key=public)
    (folder / "manifest.sig").unlink()
    with pytest.raises(BundleError, match="is not signed; sign it with 'trtdet sign'"):
        Bundle(folder, public_key=public)


def test_a_manifest_that_is_no_manifest_is_not_read_before_its_signature(signed):
    folder, _, public = signed
    (folder / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match="or was altered afterwards"):
        Bundle(folder, public_key=public)


def test_wrong_keys_are_one_error_with_the_command_that_makes_a_right_one(signed, tmp_path):
    folder, private, public = signed
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (tmp_path / "rsa.pem").write_bytes(rsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "rsa-public.pem").write_bytes(rsa_key.public_key().public_bytes(Encoding.PEM, SPKI))
    (tmp_path / "text.pem").write_text("no key")
    for name in ("rsa.pem", "text.pem", public.name):
        with pytest.raises(ConfigError, match="not a private Ed25519 key in PEM .*openssl genpkey -algorithm ed25519"):
            Bundle(folder).sign(tmp_path / name)
    for name in ("rsa-public.pem", "text.pem", private.name):
        with pytest.raises(ConfigError, match="not a public Ed25519 key in PEM; .*openssl pkey .*-pubout"):
            Bundle(folder, public_key=tmp_path / name)
    with pytest.raises(ConfigError, match=r"the key '.*absent.pem' cannot be read: No such file"):
        Bundle(folder, public_key=tmp_path / "absent.pem")
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(ConfigError, match="only bundles are signed"):
        Detector.open(tmp_path / "m.onnx", public_key=public)


def test_without_cryptography_the_error_says_what_to_install(signed, monkeypatch):
    folder, _, public = signed
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"cryptography, which is not installed; pip install 'trtdet\[sign\]'"):
        Bundle(folder, public_key=public)


def test_a_detector_opens_what_the_key_signed_and_nothing_else(signed, tmp_path):
    folder, _, public = signed
    (folder / "manifest.sig").write_bytes(bytes(64))
    with pytest.raises(BundleError, match="is not signed by the key"):
        Detector.open(folder, public_key=public)
