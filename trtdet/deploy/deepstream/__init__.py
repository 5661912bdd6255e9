"""A configuration of DeepStream's Gst-nvinfer, with everything that it names.

nvinfer scales frames itself, with one ``net-scale-factor`` for all channels, and pads with black. A bundle whose
pre-processing it cannot do is refused; differences in pre-processing are warnings.

nvinfer builds an engine from the ONNX file where the engine is missing or does not fit the machine. For INT8 it then
asks for a calibration table, also for a model with Q/DQ nodes, for which TensorRT leaves the table alone; without one
it would build in FP16. So the table is named wherever the bundle has one and TensorRT still has calibrators.

Sources: "Gst-nvinfer" in the DeepStream documentation (keys, ``y = net-scale-factor * (x - offsets)``), and the
published sources of the plugin and of libnvds_infer (the channel order of ``offsets``, the name of a built engine, INT8
without a table).
"""

from __future__ import annotations

from trtdet.backends.libraries import library_named
from trtdet.bundle import Bundle
from trtdet.config import shipped_folder
from trtdet.deploy.deepstream.config_file import CALIBRATION, CONFIG, PARSER, config_file, normalisation, parser_header
from trtdet.deploy.deepstream.readme import readme
from trtdet.deploy.deepstream.warnings import engine_warnings, pixel_warnings
from trtdet.errors import BundleError, ConfigError

_SOURCES = {
    f"{PARSER}.cpp": f"deepstream/{PARSER}.cpp",
    "CMakeLists.txt": "deepstream/CMakeLists.txt",
    "detections.cpp": "src/detections.cpp",
    **{f"trtdet/{name}.hpp": f"include/trtdet/{name}.hpp" for name in ("bundle", "detections", "errors", "export")},
}
"""The parser's sources by their names in the package: its own, and libtrtdet's suppression."""


def configuration(bundle: Bundle, name: str) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files by name, and warnings for the user.

    Args:
        bundle: with an engine of TensorRT, or with a model alone, from which nvinfer builds an engine.
        name: of the detector, for the README.

    Raises:
        BundleError, ConfigError: nvinfer cannot run the bundle as it was measured.
    """
    manifest = bundle.manifest
    scale, offsets = normalisation(manifest.input.preprocess)
    if manifest.input.dtype != "float32":
        raise BundleError(
            f"the network's input is {manifest.input.dtype}, and nvinfer gives float32",
            "build the bundle from a model with a float32 input",
        )
    lines = [label for label in manifest.model.classes if not label.isprintable() or label != label.strip()]
    if lines:
        raise ConfigError(f"class name {lines[0]!r} cannot be a line of labels.txt; rename it in the configuration")
    files = {"labels.txt": "".join(f"{label}\n" for label in manifest.model.classes).encode()}
    files["model.onnx"] = bundle.model.read_bytes()
    if bundle.engine is not None:
        files["model.engine"] = bundle.engine.read_bytes()
    backend = manifest.backend
    table = CALIBRATION in manifest.files and library_named(backend.name).may_read_calibration_cache(backend.version)
    if table:
        files[CALIBRATION] = bundle.file(CALIBRATION).read_bytes()
    for part in manifest.backend.plugins:
        files[part.file] = bundle.file(part.file).read_bytes()
    source = shipped_folder("service")
    files.update({name: (source / place).read_bytes() for name, place in _SOURCES.items()})
    files[f"{PARSER}_config.h"] = parser_header(manifest)
    warnings = [*pixel_warnings(manifest.input.preprocess), *engine_warnings(bundle, table)]
    files[CONFIG] = config_file(bundle, scale, offsets, table)
    files["README.md"] = readme(bundle, name, warnings).encode()
    return files, tuple(warnings)
