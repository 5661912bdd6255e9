"""``trtdet package``: packages a bundle for Triton or DeepStream."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, argument
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    argument(parser, "bundle BUNDLE", "the bundle to package", type=Path)
    add_output(parser, "DIR", "the folder that is written")
    what = "a model repository of Triton Inference Server, or a configuration of DeepStream's Gst-nvinfer"
    argument(parser, "--format", what, required=True, choices=("triton", "deepstream"))
    parser.add_argument("--name", help="of the served model (default: the name in the bundle's configuration)")
    group = parser.add_argument_group("Triton")
    what = "clients send image files, or RGB pixels (default: encoded)"
    argument(group, "--input", what, choices=("encoded", "pixels"))
    argument(group, "--queue-delay US", "microseconds that a batch waits for more images (default: 500)", type=int)
    argument(group, "--cpu-instances N", "processes before and after the engine (default: 2)", type=int)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.deploy import PackageOptions, TritonOptions, package

    values = {"input": options.input, "queue_delay_us": options.queue_delay, "cpu_instances": options.cpu_instances}
    values = {key: value for key, value in values.items() if value is not None}
    triton = TritonOptions(**values) if values else None
    result = package(options.bundle, options.output, PackageOptions(options.format, options.name, triton))
    console.say(
        f"wrote {result.folder}: {len(result.files)} files for {result.format}; its README.md says how to start it"
    )
    for warning in result.warnings:
        console.warn(warning)
    return result.as_dict()


COMMAND = Command(
    "package", summary="package a bundle for Triton Inference Server or DeepStream", add_options=_options, run=_run
)
