"""A factory of the user's: ``package.module:factory`` gives any ``torch.nn.Module``."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import ExportOptions, weights
from trtdet.exporter import torchvision_two_stage as two_stage
from trtdet.exporter.subject import Subject
from trtdet.exporter.trials import first_line, resized


def load(source: str, options: ExportOptions) -> Subject:
    """The module that a factory gives, with the weights and the configuration of the options.

    Raises:
        ConfigError: no configuration is given.
        ModelError: the factory cannot be found or called, or gives no module in evaluation mode.
    """
    if options.config is None:
        raise ConfigError(f"export of '{source}' needs the input's size and name; give a configuration with --config")
    with _current_directory_importable():
        model = _call(_find(source), source)
    if options.weights is not None:
        weights.load_checkpoint(model, options.weights)
    config = resized(options.config, options.size)
    if two_stage.is_one(model):
        two_stage.one_at_a_time(source, options)
        return two_stage.subject(source, model, config)
    # The exporter folds batch normalisation itself where it follows a convolution in the trace.
    return Subject(source, model, config)


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    path = str(Path.cwd())
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)


def _find(source: str) -> Callable[[], Any]:
    module_name, _, attribute = source.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"export source is {source!r}, expected package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ModelError(
            f"module '{module_name}' of source '{source}' cannot be imported: {type(error).__name__}: "
            f"{first_line(error)}; run in the folder that holds it, or install it"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ModelError(
            f"module '{module_name}' has no '{attribute}'; it has {', '.join(sorted(own)[:8]) or 'nothing callable'}"
        )
    if not callable(factory):
        raise ModelError(f"'{source}' is {type(factory).__name__}, expected a function that gives a torch.nn.Module")
    return factory  # type: ignore[no-any-return]


def _call(factory: Callable[[], Any], source: str) -> nn.Module:
    try:
        model = factory()
    except Exception as error:  # the user's code
        raise ModelError(f"'{source}' raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{source}' gave {type(model).__name__}, expected a torch.nn.Module")
    if model.training:
        raise ModelError(f"'{source}' gave a module in training mode; call eval() on it in the factory")
    return model
