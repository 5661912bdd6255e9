"""The README of a configuration for DeepStream."""

from __future__ import annotations

from trtdet import __version__
from trtdet.bundle import Bundle
from trtdet.deploy.deepstream.config_file import CONFIG, PARSER


def readme(bundle: Bundle, name: str, warnings: list[str]) -> str:
    """The README, in Markdown.

    Args:
        bundle: that is run.
        name: of the detector.
        warnings: differences from trtdet, a sentence each.
    """
    manifest = bundle.manifest
    backend = manifest.backend
    preload = ":".join(f"$PWD/{file}" for file in backend.loose_plugins)
    preload = f'LD_PRELOAD="{preload}" ' if preload else ""
    if bundle.engine is not None:
        where = (
            f"`model.engine` is of TensorRT {backend.version}: DeepStream must have that version (its release notes "
            "say which, and\n`dpkg -l | grep libnvinfer`), and the GPU one of the compute capabilities "
            f"{', '.join(f'{sm // 10}.{sm % 10}' for sm in backend.sms) or 'that it was built for'}. Where they do not "
            "fit, nvinfer\nbuilds an engine from `model.onnx` and says so in its log."
        )
    else:
        where = "nvinfer builds the engine from `model.onnx` at its first start and keeps it beside this file."
    nms = {
        "host": f"The network leaves suppression to its reader; the parser does it as trtdet does, with the values in "
        f"`{PARSER}_config.h`.",
    }.get(manifest.nms.mode, "The network suppresses; the parser only reads.")
    said = "".join(f"- {warning}{'' if warning.endswith('.') else '.'}\n" for warning in warnings)
    return f"""# {name} for DeepStream

Made by trtdet {__version__}. Gst-nvinfer reads `{CONFIG}`.

## To know before

{said}- Frames are decoded, converted and scaled by DeepStream: their grey levels are not those of trtdet, and sizes are
  cut to whole pixels where trtdet rounds. Score the pipeline on your own video.
- Scale once: give nvstreammux the size of the source, or it scales before nvinfer does.
- Gst-nvinfer leaves out boxes that reach over the upper or lower edge of the frame, as its published source has it. The
  parser clips boxes to the network's input, but where a border was padded it cannot know the frame's edge.

## Build the parser

```text
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release -DDEEPSTREAM_DIR=/opt/nvidia/deepstream/deepstream
cmake --build build && cp build/lib{PARSER}.so .
```

{nms} `cluster-mode=4` keeps nvinfer from suppressing a second time. `pre-cluster-threshold` may be raised freely.

## Run

```text
{preload}gst-launch-1.0 filesrc location=video.h264 ! h264parse ! nvv4l2decoder ! m.sink_0 nvstreammux name=m \\
    batch-size=1 width=1920 height=1080 ! nvinfer config-file-path=$PWD/{CONFIG} ! \\
    nvvideoconvert ! nvdsosd ! fakesink
```

{where}
"""
