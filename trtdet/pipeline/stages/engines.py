"""Sixth stage: the network -> an engine, and what its layers run in."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtdet.audit import Audit, audit, layers_of
from trtdet.backends import Backend, Built, Capabilities, EngineFacts, build_remembering, cuda, obstacle
from trtdet.backends.requests import Target, compose
from trtdet.errors import BackendError, TrtdetWarning
from trtdet.pipeline.options import BuildOptions
from trtdet.pipeline.stages.networks import Network
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Runtime


@dataclass(frozen=True, eq=False)
class Engine:
    """A built network.

    Attributes:
        network: what was built.
        built: what the builder gave.
        audit: what its layers run in; None where no layers were listed.
    """

    network: Network
    built: Built
    audit: Audit | None


def target_of(options: BuildOptions) -> Target:
    """What the options ask the engine to be built for."""
    return Target(options.sms, options.batch, options.plugins, options.engine)


def best_engine(
    networks: Sequence[Network], backend: Backend, target: Target, timings: Path, progress: Progress = silent
) -> Engine:
    """Builds each of some networks that compute the same, and takes the engine that is estimated to move least.

    Args:
        networks: at least one.
        backend: builds them.
        target: what the engine is for.
        timings: the file of measured kernel times, which may be missing.
        progress: told of the builder's phases.

    Raises:
        BackendError: the backend refused a network or the target.
    """
    first, *others = [built_engine(network, backend, target, timings, progress) for network in networks]
    # Where no layers are listed there is nothing to choose by, and the backend's first form stands.
    audited = [(engine.audit.bytes, engine) for engine in (first, *others) if others and engine.audit is not None]
    return min(audited, key=lambda pair: pair[0])[1] if audited else first


def built_engine(
    network: Network, backend: Backend, target: Target, timings: Path, progress: Progress = silent
) -> Engine:
    """Builds a network and audits what came out.

    Args:
        network: to build.
        backend: builds it.
        target: what the engine is for.
        timings: the file of measured kernel times, which may be missing.
        progress: told of the builder's phases.

    Raises:
        BackendError: the backend refused the network or the target.
    """
    caps = backend.capabilities
    progress(f"building the engine with {caps.name} {caps.version}", 0, 1)
    request = compose(network.model, network.precision, network.precisions, target, network.implicit)
    built = build_remembering(backend, request, timings, progress)
    return Engine(network, built, _audited(network, built, caps))


def _audited(network: Network, built: Built, caps: Capabilities) -> Audit | None:
    if not caps.lists_layers or (caps.has_inspector and not built.layers):
        return None
    return audit(layers_of(built), network.plan, network.model, silu=caps.silu)


def runs_on(
    runtime: Runtime, caps: Capabilities, sms: tuple[int, ...] = (), plugins: tuple[Path, ...] = ()
) -> Literal["engine", "onnxruntime"]:
    """Whether engines of a backend can be run here, as far as that shows before an engine is built.

    Args:
        runtime: what is to be run.
        caps: of the backend.
        sms: compute capabilities that are built for; empty for the backend's default.
        plugins: libraries that the engines load.

    Raises:
        BackendError: an engine is asked for and cannot be run.
    """
    if runtime == "onnxruntime":
        return runtime
    reason = f"{caps.name} makes none"
    if caps.makes_engine:
        wanted = sms or caps.default_sms or tuple(device.sm for device in cuda.devices())
        reason = obstacle(EngineFacts.built(caps, wanted, plugins))
    if reason and runtime == "engine":
        raise BackendError(f"engines cannot be run here, as {reason}")
    return "onnxruntime" if reason else "engine"


def warn_of(engine: Engine, caps: Capabilities) -> None:
    """Warns of what the audit found, or that there was nothing to audit."""
    if engine.audit is not None:
        for warning in engine.audit.warnings:
            warnings.warn(warning, TrtdetWarning, stacklevel=3)
    elif caps.lists_layers:
        warnings.warn(
            f"{caps.name} {caps.version} built the engine and its inspector gave nothing: it is not audited",
            TrtdetWarning,
            stacklevel=3,
        )
