"""Where the error of INT8 is: the tensors whose rounding and clipping make most of the noise at the detections.

    python benchmarks/noise.py MODEL ... --images DIR [--config NAME] [--num-images N]

MODEL is a float ONNX file; NAME is a configuration, by default the YAML file beside it, of the same name, or that which
is known for the file's name. Every convolution is in INT8. Of each tensor counts the least of its noise with one range
and with a map that gives each channel the room for its largest value; both are predicted from the gradients of the
decoded boxes and scores, see :mod:`trtdet.quantization.head_noise`. "Own ranges" is what is left of that where each
channel has the range that moves the detections least. Prints Markdown: the largest tensors, each with the weights that
read it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from ablation import config_of

from trtdet.building.graph import host_graph
from trtdet.building.ranges import calibrated, select_images, sources_of
from trtdet.calibration import expose
from trtdet.options import CalibrationOptions
from trtdet.progress import silent
from trtdet.quantization.corrections import find_sites
from trtdet.quantization.corrections.head_ranges import head_noise

LARGEST = 3


@dataclass(frozen=True)
class Tensor:
    """A quantised tensor: its noise at the detections, that with own ranges, and the shapes of what reads it."""

    noise: float
    own: float
    readers: tuple[tuple[int, ...], ...]


def tensors_of(model: Path, options: argparse.Namespace) -> list[Tensor]:
    """The quantised tensors that convolutions read, the noisiest first."""
    graph = replace(host_graph(model, config_of(model, options.config)), int8_all=True)
    calibration = CalibrationOptions(images=options.images, num_images=options.num_images)
    ranged = calibrated(graph, calibration, select_images(calibration))
    sources = sources_of(graph, ranged.paths, cache=ranged.cache, progress=silent)
    placement = graph.placement.following(graph.plan)
    sites = find_sites(graph.model, placement, ())
    exposed = expose(graph.model, [site.tensor for site in sites])
    for (outputs,) in sources.outputs([exposed], ranged.paths, "the channels' ranges"):
        for site in sites:
            site.add_moments(outputs[site.tensor], None)
    reach = {site.tensor: channels for site in sites if (channels := site.reach()).max() > 0}
    plain = head_noise(graph.model, placement, ranged.ranges, sources)
    channels = head_noise(graph.model, placement, ranged.ranges, sources, reach, plain)
    found = []
    for site in sites:
        name = site.tensor
        if name in reach:
            noise = min(plain.noise(name, plain.best(name)), channels.noise_of(name, reach[name]).min())
            own = channels.noise_of(name, channels.narrowest(name)).min()
            shapes = tuple(conv.weight.shape for conv in site.convs.values())
            found.append(Tensor(noise, min(noise, own), shapes))
    return sorted(found, key=lambda tensor: -tensor.noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--images", type=Path, required=True, help="calibration images")
    parser.add_argument("--config")
    parser.add_argument("--num-images", type=int, default=64)
    options = parser.parse_args()
    print("| detector | tensor | share of the noise | with own ranges | read by weights of |\n|---|---|---|---|---|")
    for model in options.models:
        tensors = tensors_of(model, options)
        whole = sum(tensor.noise for tensor in tensors)
        for number, tensor in enumerate(tensors[:LARGEST], 1):
            shares = f"{100 * tensor.noise / whole:.0f} % | {100 * tensor.own / whole:.0f} %"
            readers = ", ".join(" x ".join(map(str, shape)) for shape in tensor.readers)
            print(f"| {model.stem} | {number} | {shares} | {readers} |", flush=True)


if __name__ == "__main__":
    main()
