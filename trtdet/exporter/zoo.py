"""The sources with a name: YOLOX of every size, and the shapes detector."""

from __future__ import annotations

import copy

import torch

from trtdet.config import load_config
from trtdet.errors import ConfigError
from trtdet.exporter import SHAPES_MODEL, ExportOptions, weights, yolox
from trtdet.exporter.subject import Subject
from trtdet.exporter.trials import resized


def load(source: str, options: ExportOptions) -> Subject:
    """A member of the zoo with the weights and the configuration of the options, or the published configuration.

    Raises:
        ConfigError: the input's size is not a multiple of 32.
        ModelError: the weights are unusable.
    """
    variant = source.removeprefix("yolox-")
    shipped = source == "shapes" and options.weights is None
    if options.config is not None:
        config = resized(options.config, options.size)
    else:
        side = yolox.VARIANTS[variant].input_size
        published = load_config("shapes" if source == "shapes" else "yolox").model_copy(update={"name": source})
        config = resized(published, options.size or (side, side))
    size = config.input.size
    if size[0] % 32 or size[1] % 32:
        raise ConfigError(f"input.size is {list(size)}, {source} needs multiples of 32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = yolox.build(variant, len(config.classes))
    if options.weights is not None:
        weights.load_checkpoint(reference, options.weights)
    traced = copy.deepcopy(reference)
    weights.fuse_batch_norm(traced)
    if shipped:
        weights.load_by_position(traced, SHAPES_MODEL)
        reference = traced
    return Subject(source, reference, config, traced)
