"""When INT8 pays: FP16 and INT8 engines compared by a roofline on GPUs that are not here. An estimate, no measurement.

    python benchmarks/roofline.py --data DIR -o OUT

DIR holds ``models/`` and ``coco/train2017``. Builds with TensorRT-RTX for compute capability 8.6, whose kernels stand
for those of every GPU, with suppression on the host: the three published models with the options of ``trtdet build``,
and YOLOX s, m and l at 640 x 640, as trtdet's exporter defines them, with random weights and no corrections: no time
depends on the values, as long as FP16 holds them. Bundles are left in OUT and used again where they are up to date.
Prints Markdown: times, the batch from which INT8 pays, and the channels from which a convolution does.

TensorRT-RTX generates a kernel after each INT8 convolution. TensorRT 8.6 and 10 have kernels that read INT8, activate
and write INT8; engines of theirs cannot be built without a GPU. The column "fused" imagines such an engine: the kernels
of FP16's, the convolutions in INT8 that the default plan of TensorRT 8.6 and 10 has there, also those that stay in FP16
on TensorRT-RTX because they are bound by memory, and every tensor that one of them reads in INT8.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from coco_models import MODELS

import trtdet
from trtdet.audit import Tensor
from trtdet.audit.findings import activation_functions
from trtdet.audit.gpus import Gpu, gpu_named
from trtdet.audit.roofline import Estimate, estimate, flow_of
from trtdet.audit.traffic import Flow
from trtdet.data import ImageStream
from trtdet.exporter import ExportOptions, export, yolox
from trtdet.quantization import CORRECTIONS, Cause, Entry, PrecisionPlan
from trtdet.tables import Column, Table

ZOO = ("yolox-s", "yolox-m", "yolox-l")
GPUS = ("T4", "L4", "A10", "RTX 4090", "Jetson AGX Orin", "H200")
SEARCHED = tuple(2**power for power in range(10))
WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Pair:
    """The engines of a model."""

    name: str
    int8: Flow
    fp16: Flow

    @cached_property
    def fused(self) -> Flow:
        """FP16's kernels with the plan of TensorRT 8.6 and 10, whose INT8 convolutions hand on INT8 to one another."""
        names = {
            name
            for name, entry in self.int8.plan.entries.items()
            if entry.precision == "int8" or entry.cause is Cause.BOUND_BY_MEMORY
        }
        readers = {index for index, runs in self.fp16.runs.items() if any(one.name in names for one in runs)}
        read = {tensor.name for index in readers for tensor in self.fp16.layers[index].inputs}

        def lowered(tensor: Tensor, always: bool) -> Tensor:
            return replace(tensor, type="Int8") if tensor.type == "Half" and (always or tensor.name in read) else tensor

        layers = [
            replace(
                layer,
                inputs=tuple(lowered(tensor, False) for tensor in layer.inputs),
                # Biases and scales are small and stay as they are.
                constants=tuple(lowered(one, index in readers and len(one.dims) > 3) for one in layer.constants),
                outputs=tuple(lowered(tensor, False) for tensor in layer.outputs),
            )
            for index, layer in enumerate(self.fp16.layers)
        ]
        return Flow(layers, PrecisionPlan(dict.fromkeys(self.fp16.kernels, Entry("int8", ""))), self.fp16.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=[*MODELS, *ZOO], metavar="NAME", help="(default: all six)")
    parser.add_argument("--gpus", nargs="+", default=GPUS, metavar="NAME")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], metavar="N")
    parser.add_argument("--num-images", type=int, default=4, metavar="N", help="for calibration (default: %(default)s)")
    parser.add_argument("--correct", choices=("default", "none"), default="default", help="of the published models")
    options = parser.parse_args()
    gpus = [gpu_named(name) for name in options.gpus]
    pairs = [built(name, options) for name in options.models]
    print(times(pairs, gpus, options.batch).markdown(), end="\n\n")
    print(crossings(pairs, gpus).markdown(), end="\n\n")
    print(by_width(pairs, gpus, options.batch).markdown())


def built(name: str, options: argparse.Namespace) -> Pair:
    """Builds a model in both precisions, or takes what is there."""
    zoo, images = name in ZOO, options.data / "coco" / "train2017"
    config = trtdet.load_config("yolox" if zoo else MODELS[name][0])
    if zoo:
        config = config.model_copy(update={"input": config.input.model_copy(update={"size": (640, 640)})})
    model = options.data / "models" / f"{name}.onnx"
    if zoo:
        model = options.output / f"{name}.onnx"
        if not model.exists():
            options.output.mkdir(parents=True, exist_ok=True)
            checkpoint = model.with_suffix(".pth")
            torch.save(random_weights(name, sorted(images.iterdir())[: options.num_images], config), checkpoint)
            export(name, model, ExportOptions(weights=checkpoint, tolerance=0.1))
    calibration = trtdet.CalibrationOptions(images=images, num_images=options.num_images)
    correct = () if zoo or options.correct == "none" else CORRECTIONS
    flows = {}
    for precision, asked in (
        (
            "fp16",
            trtdet.BuildOptions(
                precision="fp16", nms=trtdet.NmsOptions(mode="host"), backend="tensorrt-rtx", sms=(86,)
            ),
        ),
        (
            "int8",
            trtdet.BuildOptions(
                effort=",".join(correct) or "none",
                nms=trtdet.NmsOptions(mode="host"),
                backend="tensorrt-rtx",
                sms=(86,),
                guard="off",
                plan=trtdet.PlanOptions(fastest=False),
                calibration=calibration,
            ),
        ),
    ):
        made = trtdet.build(model, config, options.output / f"{name}-{precision}", asked)
        print(f"built {made.bundle.path}", file=sys.stderr)
        flows[precision] = flow_of(made.bundle)
    return Pair(name, flows["int8"], flows["fp16"])


def random_weights(name: str, paths: Sequence[Path], config: trtdet.Config) -> dict[str, torch.Tensor]:
    """Weights with which every activation is of about unit size, as in a trained network: without that they fade from
    layer to layer, until FP16 does not hold them."""
    torch.manual_seed(0)
    network = yolox.build(name.removeprefix("yolox-"))
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    (batch,) = ImageStream(paths, config.input, batch_size=len(paths))
    with torch.no_grad():
        network.train()(torch.from_numpy(batch.images))
        for prediction in network.head.reg_preds:
            prediction.weight *= 0.1  # of widths and heights the exponential is taken
    return network.state_dict()


def times(pairs: Sequence[Pair], gpus: Sequence[Gpu], batches: Sequence[int]) -> Table:
    """Milliseconds of both engines and their ratio, and what bounds INT8."""
    rows = []
    for pair in pairs:
        for gpu in gpus:
            for batch in batches:
                half, fast, best = (estimate(flow, gpu, batch) for flow in (pair.fp16, pair.int8, pair.fused))
                row = (pair.name, gpu.name, batch, half.ms, fast.ms, half.ms / fast.ms, half.ms / best.ms)
                rows.append((*row, _bounds(half), _bounds(fast), fast.bytes / half.bytes))
    columns = (
        *("model", "GPU", "batch", Column("FP16, ms", ".3f"), Column("INT8, ms", ".3f")),
        *(Column("INT8 faster", ".2f"), Column("fused", ".2f"), "FP16 bound by", "INT8 bound by"),
        Column("bytes, INT8 against FP16", ".2f"),
    )
    return Table(columns, rows, "Estimated, not measured:")


def _bounds(found: Estimate) -> str:
    """Shares of the time by what bounds it, the most first."""
    shares = {kind: found.bound_ms(kind) / found.ms for kind in ("memory", "arithmetic", "launch")}
    ordered = sorted(shares.items(), key=lambda row: -row[1])
    return ", ".join(f"{kind} {share:.0%}" for kind, share in ordered if share >= 0.005)


def crossings(pairs: Sequence[Pair], gpus: Sequence[Gpu]) -> Table:
    """The smallest batch from which on INT8 is faster, and how much faster it gets; of the engine and were it fused."""
    rows = []
    for pair in pairs:
        for gpu in gpus:
            half = {batch: estimate(pair.fp16, gpu, batch).ms for batch in SEARCHED}
            cells: list[str | float] = []
            for flow in (pair.int8, pair.fused):
                ratios = {batch: half[batch] / estimate(flow, gpu, batch).ms for batch in SEARCHED}
                paying = [batch for batch in SEARCHED if all(ratios[other] > 1 for other in SEARCHED if other >= batch)]
                best = max(ratios, key=lambda batch: ratios[batch])
                cells += [str(paying[0]) if paying else "never", f"{ratios[best]:.2f} at {best}"]
            rows.append((pair.name, gpu.name, *cells))
    columns = (
        "model",
        "GPU",
        "INT8 pays from batch",
        "at most faster",
        "fused pays from batch",
        "at most faster, fused",
    )
    return Table(columns, rows, f"Estimated, batches up to {SEARCHED[-1]}:")


def by_width(pairs: Sequence[Pair], gpus: Sequence[Gpu], batches: Sequence[int]) -> Table:
    """For convolutions of about so many channels, how much faster INT8 is with the kernels that it needs around it."""
    rows = []
    for dense in ("1x1", "3x3 and larger"):
        for batch in batches:
            cells: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
            for pair in pairs:
                for gpu in gpus:
                    sides = [_by_convolution(flow, gpu, batch) for flow in (pair.int8, pair.fp16)]
                    for name, width in _widths(pair.int8, dense):
                        if name in sides[0] and name in sides[1]:
                            sums = cells[width][gpu.name]
                            sums[0], sums[1], sums[2] = sums[0] + sides[0][name], sums[1] + sides[1][name], sums[2] + 1
            for width in sorted(cells):
                count = int(next(iter(cells[width].values()))[2])
                ratios = [cells[width][gpu.name][1] / cells[width][gpu.name][0] for gpu in gpus]
                rows.append((dense, batch, width, count, *ratios))
    columns = ("kernel", "batch", "channels from", "convolutions", *(Column(gpu.name, ".2f") for gpu in gpus))
    return Table(columns, rows, "Estimated, FP16's time over INT8's by the narrower side of the convolutions in INT8:")


def _widths(flow: Flow, kernel: str) -> Iterator[tuple[str, int]]:
    """The convolutions that run in INT8 and are not depthwise, with the largest of ``WIDTHS`` that they reach."""
    for name, convolution in flow.convolutions.items():
        work = flow.work[name]
        if flow.layers[convolution.layer].input != "Int8" or work.groups > 1:
            continue
        if (max(work.kernel, default=1) > 1) == (kernel != "1x1"):
            narrow = min(work.inputs, work.outputs)
            yield name, max([width for width in WIDTHS if width <= narrow], default=1)


def _by_convolution(flow: Flow, gpu: Gpu, batch: int) -> Mapping[str, float]:
    """Milliseconds by convolution: of its kernel, and of those after it that compute its activation or only change the
    type or layout, shared out evenly."""
    found: dict[str, float] = defaultdict(float)
    working = [index for index, layer in enumerate(flow.layers) if layer.bytes]
    for index, layer in zip(working, estimate(flow, gpu, batch).layers, strict=True):
        owners = [convolution.name for convolution in flow.runs.get(index, ())]
        owners = owners or list(activation_functions(flow, flow.layers[index]))
        for name in owners:
            found[name] += layer.ms / len(owners)
    return found


if __name__ == "__main__":
    main()
