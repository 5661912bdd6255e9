"""Writes a C++ header with a class for each interface of TensorRT that the stand-in answers, made from the headers of
the version at hand: every pure virtual function of it ends the process with its name.

    python stubs.py INCLUDE HEADER

The stand-in overrides what libtrtdet calls; what else is called shows at once, in every version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

INTERFACES = {
    "NvInferImpl.h": ("apiv::VRuntime", "apiv::VCudaEngine", "apiv::VExecutionContext"),
    "NvInferRuntimeCommon.h": ("IPluginRegistry",),
}
RTX = {"NvInferImpl.h": ("apiv::VRuntimeConfig",)}
"""What it answers for TensorRT-RTX as well."""

FUNCTION = re.compile(
    r"virtual\s+(?P<gives>[^()=;{}~]+?)\b(?P<name>\w+)\s*\((?P<takes>[^;{}]*?)\)\s*(?P<const>const\b)?\s*"
    r"(?P<noexcept>noexcept\b)?\s*=\s*0\s*;"
)


def body(text: str, name: str) -> str:
    """What stands between the braces of a class."""
    start = re.search(rf"^class {name}\b[^;{{]*\{{", text, re.MULTILINE)
    if start is None:
        raise SystemExit(f"stubs.py: there is no class {name}")
    return text[start.end() : text.index("\n};", start.end())]


def stubs(text: str, interface: str) -> str:
    name = interface.rpartition("::")[2]
    bare = re.sub(r"//.*|^\s*#.*$", "", body(text, name), flags=re.MULTILINE)
    lines = []
    for one in FUNCTION.finditer(bare):
        takes = re.sub(r"\s*=\s*[^,]+", "", one["takes"])
        qualifiers = " ".join(filter(None, (one["const"], one["noexcept"])))
        gives = " ".join(one["gives"].split())
        lines.append(
            f"    {gives} {one['name']}({' '.join(takes.split())}) {qualifiers} override "
            f'{{ absent("{name}::{one["name"]}"); }}'
        )
    if not lines:
        raise SystemExit(f"stubs.py: class {name} has no functions")
    return f"class {name}Stubs : public {interface} {{\npublic:\n" + "\n".join(lines) + "\n};\n"


def main() -> None:
    include, header = (Path(word) for word in sys.argv[1:])
    rtx = "TRT_MAJOR_RTX" in (include / "NvInferVersion.h").read_text(encoding="utf-8")
    classes = [
        stubs((include / file).read_text(encoding="utf-8"), interface)
        for file, interfaces in (*INTERFACES.items(), *(RTX.items() if rtx else ()))
        for interface in interfaces
    ]
    header.write_text(
        "#pragma once\n#include <cstdio>\n#include <cstdlib>\n#include <NvInferRuntime.h>\nnamespace nvinfer1 {\n"
        "[[noreturn]] inline void absent(const char* name) {\n"
        '    std::fprintf(stderr, "the stand-in for TensorRT has no %s\\n", name);\n    std::abort();\n}\n'
        + "\n".join(classes)
        + "}  // namespace nvinfer1\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
