"""Finds the images of a folder or a list, selects some of them evenly, and hashes a set of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from trtdet.errors import DataError, one_line

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""File suffixes of images, in upper or lower case."""


def find_images(source: Path | str, root: Path | str | None = None) -> tuple[Path, ...]:
    """The images of a folder, sorted by name and without subfolders, or those of a list, in its order.

    A list is a ``.txt`` file with one file name per line, relative to ``root`` (None: the folder of the list). Blank
    lines and lines that start with ``#`` are skipped.

    Raises:
        DataError: the source does not exist or has no images, or files of the list are missing.
    """
    source = Path(source)
    if not _exists(source):
        raise DataError(
            f"image source '{one_line(source)}' does not exist; give a folder of images or a .txt list of file names"
        )
    if source.is_dir():
        files = sorted((entry for entry in source.iterdir() if entry.is_file()), key=lambda entry: entry.name)
        images = tuple(file for file in files if file.suffix.lower() in IMAGE_SUFFIXES)
        if images:
            return images
        suffixes = Counter(file.suffix for file in files).most_common()
        content = [f"{count} {suffix or 'without suffix'}" for suffix, count in suffixes]
        folders = sum(entry.is_dir() for entry in source.iterdir())
        if folders:
            content.append(f"{folders} folders, which are not entered")
        raise DataError(
            f"folder '{source}' has no images, it has {', '.join(content) or 'nothing'}; "
            f"allowed suffixes are {', '.join(IMAGE_SUFFIXES)}"
        )
    if source.suffix.lower() != ".txt":
        raise DataError(f"image source '{source}' is a {source.suffix or 'plain'} file; give a folder or a .txt list")
    try:
        lines = [line.strip() for line in source.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"image list '{source}' cannot be read: {error}; write one file name per line, in UTF-8"
        ) from None
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise DataError(f"image list '{source}' names no file; write one file name per line")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"image list '{source}' names {len(twice)} files twice: {first_names(twice)}; name each once")
    folder = source.parent if root is None else Path(root)
    if not folder.is_dir():
        raise DataError(f"folder '{folder}' for the names in '{source}' does not exist; give the folder that has them")
    paths = tuple(folder / name for name in names)
    missing = [path.name for path in paths if not is_file(path)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(paths)} files named in '{source}' are not in '{folder}': "
            f"{one_line(first_names(missing), 200)}; give the folder that has them as the root of the list"
        )
    return paths


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder; False for a name that nothing can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether there is such a file; False for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def first_names(names: Sequence[object], count: int = 3) -> str:
    shown = ", ".join(str(name) for name in names[:count])
    return f"{shown}, ..." if len(names) > count else shown


def content_hash(paths: Sequence[Path]) -> str:
    """Hexadecimal SHA-256 of names (without folders) and bytes of files in order; DataError if one is unreadable."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            name = path.name.encode("utf-8", "surrogateescape")
            # The lengths distinguish sets whose names and bytes concatenate to the same stream.
            digest.update(len(name).to_bytes(8, "little") + name + path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise DataError(f"'{path}' cannot be read: {error.strerror or error}; check the file") from None
    return digest.hexdigest()


Item = TypeVar("Item")


def evenly(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """At most ``count`` of the items, evenly spaced over their order."""
    count = min(count, len(items))
    return tuple(items[index * len(items) // count] for index in range(count))
