"""Facts about an engine before it is loaded, and whether it can run on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtdet.backends import cuda
from trtdet.backends.base import Capabilities
from trtdet.backends.libraries import Library, library_named
from trtdet.bundle import Bundle
from trtdet.errors import BackendError

_AMPERE = 80


@dataclass(frozen=True)
class EngineFacts:
    """Facts about an engine before it is loaded.

    Attributes:
        library: the library that built it, in ``version``.
        sms: compute capabilities it was built for.
        version_compatible: later versions of the library can run it.
        hardware_compatible: every device of compute capability 8.0 or later can run it.
        plugins: plugin libraries it needs.
        embedded: it carries its plugins, which are host code.
        dla: core of the DLA that runs a part of it.
    """

    library: Library
    version: str
    sms: tuple[int, ...]
    version_compatible: bool = False
    hardware_compatible: bool = False
    plugins: tuple[Path, ...] = ()
    embedded: bool = False
    dla: int | None = None

    @staticmethod
    def of(bundle: Bundle) -> EngineFacts:
        """The facts in a bundle's manifest."""
        backend = bundle.manifest.backend
        return EngineFacts(
            library_named(backend.name),
            backend.version,
            backend.sms,
            version_compatible=backend.version_compatible,
            hardware_compatible=backend.hardware_compatible,
            plugins=tuple(bundle.file(file) for file in backend.loose_plugins),
            embedded=backend.carries_plugins,
            dla=backend.dla,
        )

    @staticmethod
    def built(caps: Capabilities, sms: tuple[int, ...], plugins: tuple[Path, ...]) -> EngineFacts:
        """The facts of an engine that this process builds."""
        return EngineFacts(library_named(caps.name), caps.version, sms, plugins=plugins)


def obstacle(facts: EngineFacts) -> str:
    """Why an engine cannot run on this machine, as words that fit after "as"; empty if it can.

    This creates no TensorRT object: its Runtime ends the process on a machine without a device.
    """
    if absence := cuda.absence():
        return absence
    if not fitting_devices(facts):
        here = ", ".join(f"{device.name} with {device.sm / 10}" for device in cuda.devices())
        targets = " or ".join(str(sm / 10) for sm in facts.sms) + (" and later" if facts.hardware_compatible else "")
        return (
            f"the engine was built for compute capability {targets}, and this machine has {here}; build it again here"
        )
    title = facts.library.title
    try:
        installed = facts.library.load().__version__
    except BackendError as error:
        return str(error)
    if installed != facts.version and not facts.version_compatible:
        return (
            f"the engine was built with {title} {facts.version}, and {installed} is installed here; build it again, or "
            "install that version"
        )
    return cuda.no_bindings()


def fitting_devices(facts: EngineFacts) -> list[cuda.Device]:
    """The devices of this machine that can run the engine."""
    return [
        device
        for device in cuda.devices()
        if device.sm in facts.sms or (facts.hardware_compatible and device.sm >= _AMPERE)
    ]
