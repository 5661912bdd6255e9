"""Atomic files and folders, journals that resume, typed JSON, and tasks on a Ray cluster."""

from __future__ import annotations

from trtdet.files.atomic import (
    FolderWriter,
    NewFiles,
    finish_replacing,
    prepare_target,
    remove_stale,
    scratch_folder,
    sha256_file,
    write_atomically,
    write_together,
    writing,
    writing_atomically,
)

__all__ = [
    "FolderWriter",
    "NewFiles",
    "finish_replacing",
    "prepare_target",
    "remove_stale",
    "scratch_folder",
    "sha256_file",
    "write_atomically",
    "write_together",
    "writing",
    "writing_atomically",
]
