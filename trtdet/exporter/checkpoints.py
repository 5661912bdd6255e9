"""Checkpoints that hold a whole pickled network, read without running anything of them.

``torch.load`` of such a file imports what the file names and calls it. Here it is read with ``weights_only=True``, and
each class of the network is replaced by a :class:`Record`, which keeps what the file stores and does nothing. A file
that names anything else is refused before a byte of it is unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trtdet.errors import ModelError, one_line

_MOST_MODULES = 20_000
"""Of a network; real ones have a few thousand at most. A file can name a module as part of itself."""

_PLAIN = re.compile(
    r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path|datetime\.\w+|argparse\.Namespace|types\.SimpleNamespace"
    r"|functools\.partial"
)
"""Types of the standard library that trainers store beside the weights; they too are read as records."""


_NUMBERS = (bool, int, float, tuple)


class Record:
    """What a checkpoint stores of an object: the name of its class and its attributes."""

    kind = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = dict(state) if isinstance(state, dict) else {}

    def __getitem__(self, name: str) -> Any:
        return self.__dict__.get("attributes", {}).get(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        """Of a pickled mapping, whose items are set one by one."""

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules of a module, by name."""
        found = self["_modules"]
        return found if isinstance(found, dict) else {}

    def walk(self) -> Iterator[tuple[str, Record]]:
        """This module and all modules in it by their dotted paths.

        Raises:
            ModelError: they do not end.
        """
        waiting: list[tuple[str, Record]] = [("", self)]
        for count, (path, module) in enumerate(waiting):
            if count >= _MOST_MODULES:
                raise ModelError(f"the checkpoint's network has over {_MOST_MODULES} modules; is one inside itself?")
            yield path, module
            waiting += (
                (f"{path}.{name}" if path else str(name), inner)
                for name, inner in module.modules.items()
                if isinstance(inner, Record)
            )

    def state(self) -> dict[str, Tensor]:
        """The parameters and buffers of a module, as ``state_dict`` names them, in float32 where they are floats."""
        found: dict[str, Tensor] = {}
        for path, module in self.walk():
            for group in (module["_parameters"], module["_buffers"]):
                for name, value in (group if isinstance(group, dict) else {}).items():
                    if isinstance(value, Tensor):
                        value = value.detach()
                        found[f"{path}.{name}" if path else name] = (
                            value.float() if value.is_floating_point() else value
                        )
        return found


def read(path: Path, packages: tuple[str, ...], option: str) -> Any:
    """What a checkpoint holds, with a Record for each object of a class in the packages or in ``torch.nn``.

    Args:
        path: written by ``torch.save``.
        packages: names of packages, whose classes a network of this source is made of.
        option: where the path was given, for messages.

    Raises:
        ModelError: the file is missing, is no checkpoint, or names something that a network needs not.
    """
    if not path.is_file():
        raise ModelError(f"checkpoint '{path}' does not exist; check the path given with {option}")
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        _refuse(path, named, packages)
        classes: list[Any] = [(type("Record", (Record,), {"kind": name}), name) for name in sorted(named)]
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location="cpu", weights_only=True)
    except ModelError:
        raise
    except Exception as error:  # a file that is no checkpoint makes torch raise nearly anything
        raise ModelError(
            f"checkpoint '{path}' cannot be read as weights only: {one_line(error, 200) or type(error).__name__}; "
            "expected a file that torch.save wrote, whole"
        ) from None


def _refuse(path: Path, named: list[str], packages: tuple[str, ...]) -> None:
    known = ("torch.nn.modules.", "numpy.", *(f"{package}." for package in packages))
    strange = [name for name in sorted(named) if not name.startswith(known) and not _PLAIN.fullmatch(name)]
    if strange:
        raise ModelError(
            f"checkpoint '{path}' is refused: it names {', '.join(one_line(name, 60) for name in strange[:3])}, which "
            f"no network of {' or '.join(packages)} is made of; nothing of it was run; save its weights again with the "
            "package it came from"
        )


def numpy_scalars() -> list[Any]:
    """What unpickling a NumPy float needs: trainers store their best AP as a NumPy float with the weights."""
    scalar = np.float64(0).__reduce__()[0]
    # The function's module was renamed in NumPy 2; a file has the name of the version that wrote it.
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    return [*((scalar, name) for name in names), np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32))]


def load_state(model: nn.Module, state: dict[str, Tensor], path: Path, advice: str) -> None:
    """Loads parameters and buffers, all of them and no others.

    Args:
        model: to be filled.
        state: by name.
        path: the checkpoint, for messages.
        advice: what to do where they do not fit.

    Raises:
        ModelError: a name or a shape differs; the model is then as it was.
    """
    own = model.state_dict()
    # Checkpoints older than this counter are complete without it.
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k} {tuple(state[k].shape)} for {tuple(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    parts = [
        f"{len(found)} {kind} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        for kind, found in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if found
    ]
    if parts:
        raise ModelError(f"checkpoint '{path}' does not fit the model: keys {'; '.join(parts)}; {advice}")
    model.load_state_dict(state, strict=False)


def network_of(path: Path, content: Any, advice: str) -> Record:
    """The trained network: the average of the weights where the file has it, which is what its package runs.

    Raises:
        ModelError: there is none.
    """
    for key in ("ema", "model"):
        found = content.get(key) if isinstance(content, dict) else None
        if isinstance(found, Record):
            return found
    raise ModelError(f"checkpoint '{path}' holds no network under 'ema' or 'model'; {advice}")


def class_names(path: Path, stored: Any, count: Any) -> tuple[str, ...]:
    """The names of the classes, as a checkpoint lists them or by their index.

    Raises:
        ModelError: their number is not ``count``, or two are the same.
    """
    names = list(stored.values()) if isinstance(stored, dict) else stored
    if not isinstance(names, (list, tuple)) or len(names) != count:
        raise ModelError(f"checkpoint '{path}' does not name its {count} classes; give a configuration with --config")
    classes = tuple(str(name) for name in names)
    twice = [name for name in classes if classes.count(name) > 1]
    if twice:
        raise ModelError(
            f"checkpoint '{path}' names the class {one_line(repr(twice[0]), 60)} twice; give a configuration with "
            "--config"
        )
    return classes


def trained_size(*arguments: Any) -> tuple[int, int]:
    """Height and width in pixels that a network was trained at, by the first of its trainer's arguments that says it;
    640, the default of YOLOv5 and its successors, where none does."""
    for given in arguments:
        size = given.get("imgsz") if isinstance(given, dict) else given["imgsz"] if isinstance(given, Record) else None
        sides = size if isinstance(size, (list, tuple)) else [size, size]
        whole = [side for side in sides if isinstance(side, int) and 0 < side <= 1 << 16]
        if len(whole) == len(sides) == 2:
            return whole[0], whole[1]
    return 640, 640


def check_same(
    path: Path, model: nn.Module, network: Record, ignored: frozenset[str], builder: str, advice: str
) -> None:
    """Refuses a network that was built otherwise than the one that a checkpoint stores.

    Compares the class of every module by its last name, and every number that both store as an attribute.

    Args:
        path: the checkpoint, for messages.
        model: as it was built.
        network: as it was stored.
        ignored: attributes that may differ, beside ``training`` and ``momentum``.
        builder: what built it, for messages.
        advice: what to do where they differ.

    Raises:
        ModelError: there is a difference.
    """
    stored = dict(network.walk())
    for name, module in model.named_modules():
        record = stored.get(name)
        there = "absent" if record is None else record.kind.rpartition(".")[2]
        difference = ""
        if name and there != type(module).__name__:
            difference = f"module {name} is {type(module).__name__}, in the file {there}"
        for key, value in vars(module).items() if record is not None else ():
            wanted = record[key] if record is not None else None
            if key in ignored or key in ("training", "momentum") or not isinstance(value, _NUMBERS):
                continue
            if isinstance(wanted, _NUMBERS) and wanted != value:
                difference = difference or f"{name}.{key} is {value!r}, in the file {one_line(repr(wanted), 60)}"
        if difference:
            raise ModelError(f"{builder} has another network than checkpoint '{path}' holds: {difference}; {advice}")
