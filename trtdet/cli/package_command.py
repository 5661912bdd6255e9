"""``trtdet package``: a bundle for other servers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle to package")
    add_output(parser, "DIR", "the folder that is written")
    parser.add_argument(
        "--format",
        required=True,
        choices=("triton", "deepstream"),
        help="a model repository of Triton Inference Server, or a configuration of DeepStream's Gst-nvinfer",
    )
    parser.add_argument("--name", help="of the served model (default: the name in the bundle's configuration)")
    group = parser.add_argument_group("Triton")
    group.add_argument(
        "--input", choices=("encoded", "pixels"), help="clients send image files, or RGB pixels (default: encoded)"
    )
    group.add_argument(
        "--queue-delay", type=int, metavar="US", help="microseconds that a batch waits for more images (default: 500)"
    )
    group.add_argument(
        "--cpu-instances", type=int, metavar="N", help="processes before and after the engine (default: 2)"
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.deploy import PackageOptions, TritonOptions, package

    asked = {"input": options.input, "queue_delay_us": options.queue_delay, "cpu_instances": options.cpu_instances}
    given = {key: value for key, value in asked.items() if value is not None}
    triton = TritonOptions(**given) if given else None
    done = package(options.bundle, options.output, PackageOptions(options.format, options.name, triton))
    console.say(f"wrote {done.folder}: {len(done.files)} files for {done.format}; its README.md says how to start it")
    for warning in done.warnings:
        console.warn(warning)
    return done.as_dict()


COMMAND = Command("package", "a bundle for Triton Inference Server or for DeepStream", _options, _run)
