"""Reads checkpoints, a state dict or a whole pickled network, without running code from them.

A plain ``torch.load`` of a pickled network imports and calls what the file names. Here ``weights_only=True`` is set and
a :class:`Record`, which only stores data, replaces each class. A file that names anything else is refused unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from trtdet.config import load_config
from trtdet.data.folders import first_names
from trtdet.errors import ModelError, one_line

_MOST_MODULES = 20_000
"""Limit for files in which a module contains itself; real networks have at most a few thousand modules."""

_PLAIN = re.compile(
    r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path|datetime\.\w+|argparse\.Namespace|types\.SimpleNamespace"
    r"|functools\.partial"
)
"""Types of the standard library that trainers store with the weights; also read as records."""

_NUMBERS = (bool, int, float, tuple)


class Record:
    """The class name and the attributes that a checkpoint stores for an object."""

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
        """Ignores the items of a pickled mapping."""

    @property
    def modules(self) -> dict[str, Any]:
        return self["_modules"] if isinstance(self["_modules"], dict) else {}

    def walk(self) -> Iterator[tuple[str, Record]]:
        """This module and all in it, with dotted paths; a ModelError for too many, as if a module contains itself."""
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
        """Parameters and buffers of a module, named as in ``state_dict``; floats become float32."""
        tensors: dict[str, Tensor] = {}
        for path, module in self.walk():
            for group in (module["_parameters"], module["_buffers"]):
                for name, value in (group if isinstance(group, dict) else {}).items():
                    if isinstance(value, Tensor):
                        key = f"{path}.{name}" if path else name
                        tensors[key] = value.detach().float() if value.is_floating_point() else value.detach()
        return tensors


def read(path: Path, packages: tuple[str, ...], option: str) -> Any:
    """The content of a ``torch.save`` file, with a Record for each object of ``torch.nn`` and of these packages. Raises
    ModelError if the file is missing, is no checkpoint, or names something that no network needs."""
    prefixes = ("torch.nn.modules.", "numpy.", *(f"{package}." for package in packages))

    def records() -> list[Any]:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        strange = [name for name in sorted(names) if not name.startswith(prefixes) and not _PLAIN.fullmatch(name)]
        if strange:
            raise ModelError(
                f"checkpoint '{path}' is refused: it names {', '.join(one_line(name, 60) for name in strange[:3])}, "
                f"which no network of {' or '.join(packages)} is made of; nothing of it was run; save its weights "
                "again with the package it came from"
            )
        return [(type("Record", (Record,), {"kind": name}), name) for name in sorted(names)]

    return _unpickled(path, records, option, expected="a file that torch.save wrote, whole")


def read_state(path: Path | str) -> dict[str, Tensor]:
    """Reads a state dict of tensors, numbers and plain containers, bare or, as in YOLOX, under the key ``model``.
    Raises ModelError if the file is missing, is no checkpoint, or would run code."""
    scalar = np.float64(0).__reduce__()[0]
    # Trainers store their best AP as a NumPy float. NumPy 2 renamed the module of the unpickling function.
    allowed = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    allowed += [np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32))]  # type: ignore[list-item]
    expected = "a state dict saved with torch.save, bare or under the key 'model'"
    content = _unpickled(Path(path), lambda: allowed, "--weights", expected=expected)
    state = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()) or not state:
        raise ModelError(
            f"checkpoint '{path}' holds no state dict; expected names and tensors, bare or under the key 'model'"
        )
    return state


def _unpickled(path: Path, classes: Callable[[], list[Any]], option: str, expected: str) -> Any:
    """The content of a file; ``classes`` are allowed in addition to those that torch allows."""
    if not path.is_file():
        raise ModelError(f"checkpoint '{path}' does not exist; check the path given with {option}")
    try:
        with torch.serialization.safe_globals(classes()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except ModelError:
        raise
    except Exception as error:  # for a file that is no checkpoint, torch may raise nearly anything
        raise ModelError(
            f"checkpoint '{path}' cannot be read as weights only: {one_line(error, 200) or type(error).__name__}; "
            f"expected {expected}"
        ) from None


def load_state(
    model: nn.Module,
    state: dict[str, Tensor],
    path: Path | str,
    advice: str = "choose the variant and the number of classes it was trained with",
) -> None:
    """Loads all parameters and buffers; ``advice`` is for the message if they do not fit. Raises ModelError if a name
    or a shape differs; the model stays unchanged."""
    own = model.state_dict()
    # Checkpoints from before this counter existed lack it.
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k} {tuple(state[k].shape)} for {tuple(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    parts = [
        f"{len(keys)} {kind} ({first_names(keys)})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if keys
    ]
    if parts:
        raise ModelError(f"checkpoint '{path}' does not fit the model: keys {'; '.join(parts)}; {advice}")
    model.load_state_dict(state, strict=False)


def network_of(path: Path, content: Any, advice: str) -> Record:
    """The trained network, with averaged weights if the file has them; a ModelError if the file has no network."""
    for key in ("ema", "model"):
        network = content.get(key) if isinstance(content, dict) else None
        if isinstance(network, Record):
            return network
    raise ModelError(f"checkpoint '{path}' holds no network under 'ema' or 'model'; {advice}")


def family_settings(path: Path, family: str, network: Record, count: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    """A family's shipped configuration as plain values, with the name, classes and input size of a checkpoint. Raises
    ModelError if the number of its class names is not ``count``, or two names are equal."""
    stored = network["names"]
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
    settings = load_config(family).model_dump() | {"name": path.stem, "classes": classes}
    settings["input"] |= {"size": trained_size(*arguments), "name": "images"}
    return settings


def trained_size(*arguments: Any) -> tuple[int, int]:
    """Height and width in pixels from the first trainer argument that has them; else 640, the default since YOLOv5."""
    for settings in arguments:
        size = settings.get("imgsz") if isinstance(settings, dict) else None
        size = settings["imgsz"] if isinstance(settings, Record) else size
        sides = size if isinstance(size, (list, tuple)) else [size, size]
        whole = [side for side in sides if isinstance(side, int) and 0 < side <= 1 << 16]
        if len(whole) == len(sides) == 2:
            return whole[0], whole[1]
    return 640, 640


def check_same(
    path: Path, model: nn.Module, network: Record, ignored: frozenset[str], builder: str, advice: str
) -> None:
    """Raises a ModelError if the model that ``builder`` built differs from the network that a checkpoint stores.

    The class of every module, by its last name, and every number attribute must match. Attributes in ``ignored``,
    ``training`` and ``momentum`` may differ.
    """
    records = dict(network.walk())
    for name, module in model.named_modules():
        record = records.get(name)
        stored_class = "absent" if record is None else record.kind.rpartition(".")[2]
        difference = ""
        if name and stored_class != type(module).__name__:
            difference = f"module {name} is {type(module).__name__}, in the file {stored_class}"
        for key, value in vars(module).items() if record is not None else ():
            stored = record[key] if record is not None else None
            if key in ignored or key in ("training", "momentum") or not isinstance(value, _NUMBERS):
                continue
            if isinstance(stored, _NUMBERS) and stored != value:
                difference = difference or f"{name}.{key} is {value!r}, in the file {one_line(repr(stored), 60)}"
        if difference:
            raise ModelError(f"{builder} has another network than checkpoint '{path}' holds: {difference}; {advice}")


def fuse_batch_norm(model: nn.Module) -> None:
    """Folds each batch normalisation ``bn`` into the ``conv`` beside it, in place; a ModelError in training mode."""
    if model.training:
        raise ModelError("batch normalisation can only be folded in evaluation mode; call model.eval() first")
    for module in model.modules():
        if isinstance(norm := getattr(module, "bn", None), nn.BatchNorm2d):
            # In float64, so that folding rounds only once.
            fused = fuse_conv_bn_eval(module.conv.double(), norm.double())  # type: ignore[type-var]
            module.conv, module.bn = fused.float(), nn.Identity()
