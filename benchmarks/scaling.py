"""How processor time and memory grow with images, layers and input size, and what Ray workers gain.

    python benchmarks/scaling.py --images DIR --annotations JSON -o OUT [--chart PNG] [--only AXIS ...] [--commands ...]

Networks are chains of residual convolutions with 32 channels at an eighth of the input's side, with random weights:
``calibrate``, ``eval``, ``prepare`` and ``tune`` do the same work on them as on trained ones. Each command is a process
of its own; its processor time and the peak of its memory are those that the kernel reports. Rows are kept in
OUT/rows.jsonl, and another run goes on after them. Prints a table for each axis, with the time fitted as a constant and
a part in proportion (least squares of relative errors), and the exponent of growth between the two largest values.

``--chart`` needs matplotlib. ``--ray`` ranks the layers of a network without Ray and on clusters of 1, 2 and 4 workers
on this machine, in place of the axes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "building"))

from odd_networks import Draft  # noqa: E402

CHANNELS, STRIDE = 32, 8
AXES = {"images": (64, 512, 1742), "layers": (60, 113, 300, 600), "side": (320, 640, 960, 1280)}
COMMANDS = ("calibrate", "eval", "prepare", "tune")
FEW, CONVS, SIDE = 64, 60, 320
"""Images, layers and side in pixels of what an axis does not change."""
LEAST = 12  # layers of a network whose ranking takes little more than starting
CALIBRATED = 32  # images of what does not measure calibration
RANKED = 4  # images on which layers are ranked: the time of a ranking grows with the square of the layers
RAY = str(Path(sys.executable).with_name("ray"))
PORT = "6399"
UNCHECKED = ("--set", "calibration.check_input=false")  # these networks detect nothing

CONFIG = """
name: chain
classes: [c0, c1]
input: {{size: [{side}, {side}], resize: stretch}}
head: {{decode: yolov8, outputs: [output]}}
nms: {{score_threshold: 0.01}}
"""


@dataclass(frozen=True)
class Row:
    """A measured command."""

    axis: str
    command: str
    value: int  # on the axis
    cpu: float  # seconds
    wall: float  # seconds
    peak: float  # MiB


def chain(convs: int, side: int) -> onnx.ModelProto:
    """A network of so many convolutions for images of ``side`` x ``side`` pixels."""
    draft = Draft(size=(side, side))
    features = draft.add("Relu", draft.conv("image", draft.weight(CHANNELS, 3, 3, 3), strides=[STRIDE, STRIDE]))
    for _ in range(convs - 3):  # the first, and two of the head
        branch = draft.add("Relu", draft.conv(features, draft.weight(CHANNELS, CHANNELS, 3, 3, scale=0.3)))
        features = draft.add("Add", features, branch)
    return draft.model(features, CHANNELS, (side // STRIDE) ** 2)


def network(folder: Path, convs: int, side: int) -> list[str | Path]:
    """The network's file and its configuration, as arguments of a command."""
    model, config = folder / f"chain-{convs}-{side}.onnx", folder / f"chain-{side}.yaml"
    if not model.is_file():
        onnx.save(chain(convs, side), model)
        config.write_text(CONFIG.format(side=side))
    return [model, "--config", config]


def annotated(options: argparse.Namespace, count: int) -> list[str | Path]:
    """The first images of the data and their annotations, all of two classes, as arguments of a command."""
    folder = options.output / f"images-{count}"
    if not (folder / "instances.json").is_file():
        whole = json.loads(options.annotations.read_text())
        images = sorted(whole["images"], key=lambda image: image["file_name"])[:count]
        if len(images) < count:
            raise SystemExit(f"{count} annotated images are needed, '{options.annotations}' has {len(images)}")
        kept = {image["id"] for image in images}
        boxes = [{**box, "category_id": box["category_id"] % 2} for box in whole["annotations"]]
        (folder / "images").mkdir(parents=True)
        for image in images:
            (folder / "images" / image["file_name"]).symlink_to((options.images / image["file_name"]).resolve())
        classes = [{"id": number, "name": f"c{number}"} for number in range(2)]
        part = {"images": images, "annotations": [box for box in boxes if box["image_id"] in kept]}
        (folder / "instances.json").write_text(json.dumps({**part, "categories": classes}))
    return [folder / "images", "--annotations", folder / "instances.json"]


def commands(options: argparse.Namespace, axis: str, value: int) -> Iterator[tuple[str, list[str | Path]]]:
    """The commands that are measured at a value of an axis."""
    count = value if axis == "images" else FEW
    convs, side = value if axis == "layers" else CONVS, value if axis == "side" else SIDE
    chosen, images = network(options.output, convs, side), annotated(options, count)
    calibration = ["--images", annotated(options, FEW)[0], "--num-images", CALIBRATED, "--effort", "none"]
    calibration += [*UNCHECKED, f"plan.rank_images={RANKED}"]
    yield "calibrate", ["calibrate", *chosen, "--images", images[0], "--num-images", count, *UNCHECKED, "-o", "ranges"]
    yield "eval", ["eval", *chosen, "--images", *images, *UNCHECKED]
    scored = ["--val-images", *images]
    target = ["--for", "tensorrt-10.3", "--points", 1]
    yield "prepare", ["prepare", *chosen, *calibration, *scored, *target, "-o", "prepared"]
    yield "tune", ["tune", *chosen, *calibration, *scored, "--backend", "onnxruntime", "-o", "tuned"]


def measured(command: list[str | Path], place: Path, keep: bool = False) -> tuple[float, float, float]:
    """Processor seconds, seconds and MiB of a command, which runs in an empty folder, or goes on in the one it left."""
    if not keep:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    started = time.monotonic()
    with (place / "log.txt").open("wb") as log:
        whole = [sys.executable, "-m", "trtdet", *map(str, command)]
        process = subprocess.Popen(whole, cwd=place, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(whole)} failed: {(place / 'log.txt').read_text()[-500:]}")
    return used.ru_utime + used.ru_stime, time.monotonic() - started, used.ru_maxrss / 1024


def fit(values: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """The constant and the factor of ``seconds = constant + factor * values`` with the least relative errors."""
    table = np.stack([1 / seconds, values / seconds], axis=1)
    constant, factor = np.linalg.lstsq(table, np.ones(len(values)), rcond=None)[0]
    return float(constant), float(factor)


def work(axis: str, values: list[int]) -> NDArray[np.float64]:
    """What the time should be in proportion to: pixels for the side, else the values."""
    return np.array(values, np.float64) ** (2 if axis == "side" else 1)


def report(axis: str, rows: list[Row]) -> None:
    """The table of an axis."""
    unit = {"images": "image", "layers": "layer", "side": "million pixels"}[axis]
    print(f"\n## {axis}\n\n| command | {axis} | s of processor time | MiB | constant, s | s per {unit} | exponent |")
    print("|---|---|---|---|---|---|---|")
    for command in dict.fromkeys(row.command for row in rows):
        part = sorted((row for row in rows if row.command == command), key=lambda row: row.value)
        amount = work(axis, [row.value for row in part])
        constant, factor = fit(amount, np.array([row.cpu for row in part]))
        rise = math.log(part[-1].cpu / part[-2].cpu) / math.log(amount[-1] / amount[-2])
        factor *= 1e6 if axis == "side" else 1
        columns = ["values", "cpu", "peak"]
        listed = {
            "values": " / ".join(str(row.value) for row in part),
            "cpu": " / ".join(f"{row.cpu:.1f}" for row in part),
            "peak": " / ".join(f"{row.peak:.0f}" for row in part),
        }
        cells = [command, *(listed[name] for name in columns), f"{constant:.1f}", f"{factor:.3g}", f"{rise:.2f}"]
        print(f"| {' | '.join(cells)} |")


def draw(rows: list[Row], path: Path) -> None:
    """Time and memory by each axis, as a picture."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(row.axis for row in rows))
    figure = Figure(figsize=(4 * len(axes), 6.4), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        for command in dict.fromkeys(row.command for row in rows if row.axis == axis):
            part = sorted((r for r in rows if (r.axis, r.command) == (axis, command)), key=lambda row: row.value)
            values, colour = [row.value for row in part], f"C{COMMANDS.index(command)}"
            panels[0][column].loglog(values, [row.cpu for row in part], colour, marker="o", label=command)
            panels[1][column].semilogx(values, [row.peak for row in part], colour, marker="o")
        for panel in (panels[0][column], panels[1][column]):
            panel.set_xticks(AXES[axis], [str(value) for value in AXES[axis]])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.set_xlabel({"images": "images", "layers": "convolutions", "side": "side of the input, pixels"}[axis])
        marks = [mark * 10**power for power in range(4) for mark in (1, 2, 5)]
        low, high = panels[0][column].get_ylim()
        shown = [mark for mark in marks if low <= mark <= high]
        panels[0][column].set_yticks(shown, [str(mark) for mark in shown])
        panels[1][column].set_ylim(bottom=0)
    panels[0][0].set_ylabel("processor time, s")
    panels[1][0].set_ylabel("peak of memory, MiB")
    panels[0][0].legend()
    figure.savefig(path, dpi=110)


def ranked(place: Path) -> dict[str, object]:
    """The ranking that a command wrote, without the time it took."""
    written: dict[str, object] = json.loads((place / "s.json").read_text())
    return {key: value for key, value in written.items() if key != "seconds"}


def workers(options: argparse.Namespace) -> None:
    """Rankings on clusters of some workers on this machine, against what is predicted from a ranking on a single core.

    The time of a ranking whose rows are all there is the constant; the rest is divided by the workers, as far as there
    are cores for them. Added is the time that a cluster takes to rank the shortest network.
    """
    images, cores = annotated(options, FEW)[0], os.sched_getaffinity(0)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # the cluster is on the loopback, and whoever has a token is not asked
    ranking = ["--images", images, "--num-images", 16, *UNCHECKED, "-o", "s.json"]
    command = ["sensitivity", *network(options.output, 113, SIDE), *ranking]
    place = options.output / "run"
    os.sched_setaffinity(0, {min(cores)})
    alone = measured(command, place)[1]
    rows = ranked(place)
    constant = measured(command, place, keep=True)[1]
    os.sched_setaffinity(0, cores)
    least = ["sensitivity", *network(options.output, LEAST, SIDE), *ranking]
    shortest = measured(least, place)[1]
    print(f"{len(cores)} cores; without Ray on a single core {alone:.1f} s, {constant:.1f} s of them constant\n")
    print("| workers | predicted, s | measured, s | measured / predicted | ranking |\n|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        for count in (1, 2, 4):
            head = (
                f"start --head --node-ip-address 127.0.0.1 --port {PORT} --num-cpus {count} --include-dashboard false"
            )
            subprocess.run([RAY, *head.split(), "--temp-dir", folder], check=True, stdout=subprocess.DEVNULL)
            try:
                cluster = ["--set", f"plan.ray=127.0.0.1:{PORT}"]
                started = measured([*least, *cluster], place)[1] - shortest
                together = measured([*command, *cluster], place)[1]
            finally:
                subprocess.run([RAY, "stop", "--force"], check=True, stdout=subprocess.DEVNULL)
            predicted = constant + max(started, 0) + (alone - constant) / min(count, len(cores))
            same = "the same" if ranked(place) == rows else "another"
            print(f"| {count} | {predicted:.1f} | {together:.1f} | {together / predicted:.2f} | {same} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True, help="COCO instances of the images")
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--chart", type=Path, help="PNG of time and memory")
    parser.add_argument("--ray", action="store_true", help="rank on Ray clusters of this machine instead")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.ray:
        workers(options)
        return
    journal = options.output / "rows.jsonl"
    rows = [Row(**json.loads(line)) for line in journal.read_text().splitlines()] if journal.is_file() else []
    for axis in options.only:
        for value in AXES[axis]:
            chosen = (item for item in commands(options, axis, value) if item[0] in options.commands)
            for name, command in chosen:
                if not any((row.axis, row.command, row.value) == (axis, name, value) for row in rows):
                    rows.append(Row(axis, name, value, *measured(command, options.output / "run")))
                    with journal.open("a") as stream:
                        print(json.dumps(asdict(rows[-1])), file=stream)
    rows = [row for row in rows if row.axis in options.only and row.command in options.commands]
    for axis in options.only:
        report(axis, [row for row in rows if row.axis == axis])
    if options.chart is not None:
        draw(rows, options.chart)


if __name__ == "__main__":
    main()
