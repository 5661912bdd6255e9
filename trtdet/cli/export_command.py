"""``trtdet export``: torch to ONNX."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, config_if_given
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="yolox-nano|tiny|s|m|l|x, shapes, or package.module:factory")
    add_output(parser, "model.onnx", "where the ONNX model is written")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="a checkpoint of the source, loaded without running code of it"
    )
    parser.add_argument("--config", help="YAML file or shipped name; required for package.module:factory")
    parser.add_argument("--dynamic-batch", action="store_true", help="leave the batch size open")
    parser.add_argument("--opset", type=int, default=17, metavar="N", help="ONNX opset (default: %(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="largest difference to torch's outputs that is accepted (default: %(default)s)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from dataclasses import asdict

    from trtdet.exporter import ExportOptions, export

    report = export(
        options.source,
        options.output,
        ExportOptions(
            weights=options.weights,
            config=config_if_given(options),
            dynamic_batch=options.dynamic_batch,
            opset=options.opset,
            tolerance=options.tolerance,
        ),
    )
    for output in report.outputs:
        shape = "x".join(map(str, output.shape))
        difference = f"largest difference to torch {output.max_abs:.2e}, mean {output.mean_abs:.2e}"
        console.say(f"{output.name} {shape}: {difference}")
    console.say(f"wrote {report.path}")
    result: dict[str, Any] = json.loads(json.dumps(asdict(report), default=str))
    return result


COMMAND = Command("export", "torch model to ONNX, checked against torch", _options, _run)
