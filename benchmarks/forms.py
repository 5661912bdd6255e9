"""What the forms of an INT8 network cost: engines with and without corrections, and with channel maps left out.

    python benchmarks/forms.py MODEL ... --images DIR [--num-images 64] [--gpus L4 T4] [--backend tensorrt-rtx]

MODEL is a float ONNX file of a name that trtdet has a configuration for. Every convolution that can be is in INT8. An
engine is built for each form, and its time on each GPU is estimated from its layers, so that a form that adds kernels
between convolutions would show. Prints Markdown; ``Mul`` is the number of these nodes in the network.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from coco_models import MODELS

from trtdet.audit.gpus import gpu_named
from trtdet.audit.roofline import estimate
from trtdet.audit.traffic import Flow
from trtdet.backends import EngineTarget, choose
from trtdet.building.corrections import prepared
from trtdet.building.engine import best_engine, explicit_networks
from trtdet.building.graph import build_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.config import load_config
from trtdet.errors import TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, PlanOptions
from trtdet.quantization import DEFAULT_CORRECTIONS

FORMS = {
    "textbook": (),
    "corrected without channel maps": tuple(name for name in DEFAULT_CORRECTIONS if name != "smooth"),
    "corrected": DEFAULT_CORRECTIONS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--gpus", nargs="+", default=["L4", "T4"])
    parser.add_argument("--backend", default="tensorrt-rtx")
    options = parser.parse_args()
    warnings.simplefilter("ignore", TrtdetWarning)
    gpus = [gpu_named(name) for name in options.gpus]
    print("| model | form | Mul | kernels | MB moved | " + " | ".join(f"{gpu.name}, ms" for gpu in gpus) + " |")
    print("|---" * (5 + len(gpus)) + "|", flush=True)
    for path in options.models:
        for form, names in FORMS.items():
            flow, muls = built(path, names, options)
            found = [estimate(flow, gpu) for gpu in gpus]
            times = " | ".join(f"{each.ms:.4f}" for each in found)
            moved = f"{len(found[0].layers)} | {flow.bytes / 1e6:.2f}"
            print(f"| {path.stem} | {form} | {muls} | {moved} | {times} |", flush=True)


def built(path: Path, correct: tuple[str, ...], options: argparse.Namespace) -> tuple[Flow, int]:
    """The layers of an engine, and the Mul nodes of its network."""
    calibration = CalibrationOptions(images=options.images, num_images=options.num_images, check_input=False)
    asked = BuildOptions(
        precision="int8",
        effort=",".join(correct) or "none",
        nms=NmsOptions(mode="host"),
        backend=options.backend,
        sms=(89,),
        guard="off",
        calibration=calibration,
        plan=PlanOptions(int8_all=True),
    )
    backend = choose(asked.backend)
    graph = build_graph(path, load_config(MODELS[path.stem][0]), asked, backend)
    ready = prepared(calibrated(graph, calibration, select_images(calibration)), calibration, correct)
    networks = explicit_networks(ready, ready.plan, backend.capabilities)
    with TemporaryDirectory() as folder:
        engine = best_engine(networks, backend, EngineTarget.of(asked), Path(folder) / "timings")
    assert engine.audit is not None, "the backend lists its layers"
    model = engine.network.model
    return Flow(engine.audit.layers, engine.network.plan, model), sum(
        node.op_type == "Mul" for node in model.graph.node
    )


if __name__ == "__main__":
    main()
