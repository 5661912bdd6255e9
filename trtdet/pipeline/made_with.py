"""What the folder of a tune or a sweep was made with, so that a report tells of it what a bundle tells of itself:
versions, the configuration, the options of each command, and the tensor of the histograms that a convolution reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from trtdet import __version__
from trtdet.backends import Capabilities
from trtdet.config import Config
from trtdet.files import sha256_file, write_atomically
from trtdet.files.documents import read_result
from trtdet.pipeline.stages.calibrating import Selection
from trtdet.pipeline.stages.rewriting import Graph

MADE_WITH = "made-with.json"


@dataclass(frozen=True)
class Making:
    """One command that wrote into the folder.

    Attributes:
        created: when, ISO 8601 in UTC.
        trtdet: version.
        backend: its name.
        backend_version: its version.
        sms: compute capabilities that were asked for, such as 86.
        options: as they were given, plain values of :class:`trtdet.pipeline.TuneOptions` or
            :class:`trtdet.pipeline.variants.SweepOptions`.
    """

    created: str
    trtdet: str
    backend: str
    backend_version: str
    sms: tuple[int, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class MadeWith:
    """What ``made-with.json`` holds.

    Attributes:
        schema: 1.
        model: SHA-256 of the float ONNX file.
        images: SHA-256 of the calibration images' names and contents.
        config: the configuration as it was resolved.
        histograms: the name of their file in the folder.
        inputs: by convolution, in the order of the network, the tensor of the histograms that it reads.
        makings: commands whose rows the folder has, the latest last.
    """

    schema: Literal[1]
    model: str
    images: str
    config: dict[str, Any]
    histograms: str
    inputs: dict[str, str]
    makings: tuple[Making, ...]

    @staticmethod
    def by(making: Making, model: Path, config: Config, graph: Graph, selected: Selection, histograms: str) -> MadeWith:
        """What a folder is made with by its first command.

        Args:
            making: the command.
            model: the float ONNX file.
            config: its configuration, as given.
            graph: the model as it was rewritten.
            selected: the calibration images.
            histograms: the name of their file.
        """
        plain = config.model_dump(mode="json")
        return MadeWith(1, sha256_file(model), selected.sha256, plain, histograms, _inputs(graph), (making,))

    def after(self, earlier: MadeWith | None) -> MadeWith:
        """The same with the commands before it, whose rows the folder has too; one that is repeated stands once."""
        asked = [making.options for making in self.makings]
        known = () if earlier is None else earlier.makings
        return replace(self, makings=(*(one for one in known if one.options not in asked), *self.makings))

    def save(self, folder: Path) -> None:
        """Writes ``made-with.json``."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_atomically(folder / MADE_WITH, text.encode())

    @staticmethod
    def load(folder: Path) -> MadeWith | None:
        """Reads ``made-with.json``; None where there is none, as earlier versions wrote none.

        Raises:
            ConfigError: it cannot be read, or is of another kind.
        """
        path = folder / MADE_WITH
        return (
            read_result(path, MadeWith, "remove it and repeat the command into its folder") if path.is_file() else None
        )


def making(caps: Capabilities, sms: tuple[int, ...], options: object) -> Making:
    """A command of now.

    Args:
        caps: of the backend.
        sms: compute capabilities that were asked for.
        options: the dataclass of the options, as they were given.
    """
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    plain = TypeAdapter(type(options)).dump_python(options, mode="json")
    return Making(created, __version__, caps.name, caps.version, sms, plain)


def _inputs(graph: Graph) -> dict[str, str]:
    readers = graph.placement.readers.items()
    found = {node: tensor for tensor, nodes in readers for node, position in nodes if position == 0}
    return {name: found[name] for name in graph.plan.entries if name in found}
