"""Writes headers with the interface of TensorRT-RTX, made from those of TensorRT 11.

    python rtx_headers.py INCLUDE FOLDER

The headers of TensorRT-RTX come with its SDK alone: neither its wheels nor NVIDIA's repository of it hold them. What is
added here is what NVIDIA's samples call (NVIDIA/TensorRT-RTX on GitHub, samples/apiUsage/cpp) and the Python bindings
of 1.7 name. The order of the virtual functions is not published, so what is built with these headers runs over the
stand-ins, and of the library itself calls the functions of C alone.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

MAJOR, MINOR, PATCH, BUILD = 1, 7, 1, 116

DECLARED = """\
enum class DynamicShapesKernelSpecializationStrategy : int32_t;
enum class CudaGraphStrategy : int32_t;
class IRuntimeCache;
"""

FUNCTIONS = (
    "void setDynamicShapesKernelSpecializationStrategy(DynamicShapesKernelSpecializationStrategy strategy)",
    "bool setCudaGraphStrategy(CudaGraphStrategy strategy)",
    "IRuntimeCache* createRuntimeCache()",
    "bool setRuntimeCache(IRuntimeCache const& cache)",
)
"""Of IRuntimeConfig."""

TYPES = """\
enum class DynamicShapesKernelSpecializationStrategy : int32_t { kLAZY = 0, kEAGER = 1, kNONE = 2 };
enum class CudaGraphStrategy : int32_t { kDISABLED = 0, kWHOLE_GRAPH_CAPTURE = 1 };
class IRuntimeCache : public INoCopy
{
public:
    virtual ~IRuntimeCache() noexcept = default;
    virtual bool deserialize(void const* data, size_t size) noexcept = 0;
    virtual IHostMemory* serialize() const noexcept = 0;
};
"""


def inserted(text: str, before: str, lines: str, after: str = "") -> str:
    """The text with lines before a word that stands in it once, at or past ``after``."""
    place = text.find(before, text.index(after))
    if place < 0:
        raise SystemExit(f"rtx_headers.py: there is no '{before}'; give the headers of TensorRT 11")
    return text[:place] + lines + text[place:]


def forwarded(function: str) -> str:
    name, given = re.fullmatch(r".*?(\w+)\((?:.*?(\w+))?\)", function).groups()  # type: ignore[union-attr]
    return f"    {function} noexcept\n    {{\n        return mImpl->{name}({given or ''});\n    }}\n"


def main() -> None:
    include, folder = (Path(word) for word in sys.argv[1:])
    shutil.copytree(include, folder, dirs_exist_ok=True)
    (folder / "NvInferVersion.h").write_text(
        "#ifndef NV_INFER_VERSION_H\n#define NV_INFER_VERSION_H\n"
        + "".join(
            f"#define TRT_{part}_RTX {number}\n#define NV_TENSORRT_{part} TRT_{part}_RTX\n"
            for part, number in (("MAJOR", MAJOR), ("MINOR", MINOR), ("PATCH", PATCH), ("BUILD", BUILD))
        )
        + "#endif\n",
        encoding="utf-8",
    )
    path = folder / "NvInferImpl.h"
    text = inserted(path.read_text(encoding="utf-8"), "class IRuntimeConfig;", DECLARED)
    virtual = "".join(f"    virtual {function} noexcept = 0;\n" for function in FUNCTIONS)
    path.write_text(inserted(text, "};", virtual, after="class VRuntimeConfig "), encoding="utf-8")
    path = folder / "NvInferRuntime.h"
    text = inserted(path.read_text(encoding="utf-8"), "class IRuntimeConfig :", TYPES)
    calls = "".join(forwarded(function) for function in FUNCTIONS)
    path.write_text(inserted(text, "\nprotected:", "\n" + calls, after="class IRuntimeConfig :"), encoding="utf-8")


if __name__ == "__main__":
    main()
