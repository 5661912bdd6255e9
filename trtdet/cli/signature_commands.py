"""``trtdet sign`` and ``verify``: who made a bundle."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import argument
from trtdet.progress import Console


def _sign_options(parser: ArgumentParser) -> None:
    argument(parser, "bundle BUNDLE", "the folder of the bundle", type=Path)
    what = "the private Ed25519 key, PEM, as 'openssl genpkey -algorithm ed25519' writes it"
    argument(parser, "--key FILE", what, type=Path, required=True)


def _sign(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.bundle import Bundle

    bundle = Bundle(options.bundle)
    place = bundle.sign(options.key)
    console.say(f"signed {len(bundle.manifest.files)} files of {options.bundle}: wrote {place}")
    return {"bundle": str(options.bundle), "signature": str(place), "files": sorted(bundle.manifest.files)}


def _verify_options(parser: ArgumentParser) -> None:
    argument(parser, "bundle BUNDLE", "the folder of the bundle", type=Path)
    what = (
        "the public Ed25519 key, PEM, that must have signed it (default: only the files are compared with their hashes)"
    )
    argument(parser, "--key FILE", what, type=Path)


def _verify(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.bundle import Bundle

    bundle = Bundle(options.bundle, public_key=options.key)
    files = len(bundle.manifest.files)
    signed = f"signed by the key of {options.key}" if options.key else "by whom it was made was not asked: give --key"
    console.say(f"{options.bundle} is whole: {files} files as the manifest has them; {signed}")
    return {"bundle": str(options.bundle), "files": files, "signed": options.key is not None}


SIGN = Command(
    "sign",
    summary="sign a bundle with a private key",
    add_options=_sign_options,
    run=_sign,
    examples=(("bundle --key private.pem", "before it is shipped"),),
)
VERIFY = Command(
    "verify",
    summary="compare a bundle with its hashes, and with the key that must have signed it",
    add_options=_verify_options,
    run=_verify,
    examples=(
        ("bundle", "that no file was altered"),
        ("bundle --key public.pem", "and who made it"),
    ),
)
