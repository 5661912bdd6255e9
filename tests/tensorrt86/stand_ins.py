"""Stand-ins for cuBLAS and cuDNN, so that TensorRT 8.6 can be imported on a machine that has neither.

    python stand_ins.py TENSORRT FOLDER

TENSORRT is the folder of the installed ``tensorrt`` package. Its plugin library is linked against cuBLAS 12 and
cuDNN 8, over a gigabyte that no plugin of a detector calls. In FOLDER a library is built for each that has exactly the
symbols asked for, under the version asked for; each function gives the status 1, which in all three is a failure, so
that nothing that does call one takes it for done. It needs ``nm`` and ``cc``.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

VENDORS = ("libcublas", "libcublasLt", "libcudnn")


def wanted(library: Path) -> dict[str, list[str]]:
    """The functions that a library takes from cuBLAS and cuDNN, by file name: there it is the symbol's version too."""
    found: dict[str, list[str]] = defaultdict(list)
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    ).stdout
    for line in listed.splitlines():
        name, _, version = line.split()[-1].partition("@")
        if version.partition(".so.")[0] in VENDORS:
            found[version].append(name)
    return found


def build(soname: str, functions: list[str], folder: Path) -> None:
    """Compiles one stand-in."""
    source = folder / f"{soname}.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in functions))
    script = folder / f"{soname}.map"
    script.write_text(f"{soname} {{ global: *; }};\n")
    options = ["-shared", "-fPIC", "-nostdlib", "-w", f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
    subprocess.run(["cc", *options, "-o", folder / soname, source], check=True)


def main() -> None:
    package, folder = (Path(word) for word in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for soname, functions in wanted(package / "libnvinfer_plugin.so.8").items():
        build(soname, functions, folder)


if __name__ == "__main__":
    main()
