"""Whether a bundle is what a command would build, told by what the command reads, before any model is parsed.

:mod:`trtdet.building.job` decides it for every build, after the model was rewritten. This asks less: the bundle holds
the hash of the request that made it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import Any

from trtdet import __version__
from trtdet.backends import cuda
from trtdet.building.selection import calibration_images, chosen_images
from trtdet.building.worth import WORTH
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.data.folders import content_hash
from trtdet.errors import TrtdetError
from trtdet.files import remove_stale, sha256_file
from trtdet.options import BuildOptions

REQUEST = "request"
"""Key of the hash in the manifest's ``command``; its value is None where the hash does not tell all."""

_INSTALLED = (".dist-info", ".egg-info")


def request_of(model: Path, config: Config, options: BuildOptions) -> str | None:
    """SHA-256, as 64 hexadecimal digits, of all that a build depends on: the model, the configuration, the options with
    the content of the files that they name, the calibration images, installed packages, and GPUs.

    None if the request has parts whose content is not hashed here: weights in other files than the model's, a plan of a
    ``tune``, folders other than that of the calibration images; or if a file cannot be read.
    """
    calibration = options.calibration
    try:
        content = model.read_bytes()
        # The key of ONNX's external data. A model that has the word elsewhere is rewritten once more, nothing else.
        if b"location" in content or options.from_ is not None:
            return None
        paths = calibration_images(calibration)
        if paths and len(paths) < (calibration.num_images or 0):
            return None  # of which the build warns
        images = content_hash(chosen_images(calibration))
        rest = asdict(replace(options, calibration=replace(calibration, images=None, root=None)))
        files = [sha256_file(path) for path in _paths(rest)]
        packages = sorted(name for folder in sys.path for name in _distributions(Path(folder)))
    except (OSError, TrtdetError):
        return None
    facts = {
        "trtdet": __version__,
        "python": sys.version,
        "packages": packages,
        "devices": [device.name for device in cuda.devices()],
        "model": hashlib.sha256(content).hexdigest(),
        "config": config.model_dump(mode="json"),
        "options": rest,
        "files": files,
        "images": images,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def unchanged(model: Path, config: Config, output: Path, options: BuildOptions) -> Bundle | None:
    """The bundle at ``output`` if this request made it, with all files as their hashes say; what a killed build left
    beside it is removed.

    None if it has to be looked at in full: also where a build has to warn of something, or to compare with FP16, or
    an earlier build left files beside the bundle.
    """
    try:
        bundle = Bundle(output)
    except TrtdetError:
        return None
    manifest = bundle.manifest
    before = manifest.command.get(REQUEST)
    if before is None or before != request_of(model, config, options):
        return None
    compared = WORTH in manifest.files or manifest.guard is not None or bundle.engine is None
    compared |= not (options.int8 and options.compare)
    warned = manifest.input_check is not None and bool(manifest.input_check.get("warning"))
    # Parts of a two-stage model that are left, an NMS of the model with other thresholds, and FP8 without a product for
    # it are warned of at every build.
    warned |= manifest.masks is not None or manifest.nms.embedded
    warned |= options.plan.fp8 or options.plan.int8_attention
    left = [path for path in output.parent.glob(f"{escape(output.name)}.*") if path.suffix != ".timing-cache"]
    if not compared or warned or left:
        return None
    remove_stale(output)
    return bundle


def _paths(value: Any) -> Iterator[Path]:
    """The files that options name, in their order."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _paths(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _paths(part)


def _distributions(folder: Path) -> list[str]:
    """Names with versions of the packages that are installed in a folder of ``sys.path``."""
    return [path.name for path in folder.iterdir() if path.suffix in _INSTALLED] if folder.is_dir() else []
