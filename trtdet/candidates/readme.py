"""README of a folder of candidates."""

from __future__ import annotations

from trtdet.backends.base import Capabilities
from trtdet.candidates.folder import Candidate, candidates_table

_TRTEXEC = "trtexec --onnx={model} --saveEngine={name}.engine --useCudaGraph"


def readme(candidates: tuple[Candidate, ...], caps: Capabilities, bound: str) -> str:
    """The table of the candidates, and the command of trtexec for each."""
    lines = []
    for candidate in candidates:
        command = _TRTEXEC.format(model=candidate.model, name=candidate.name)
        if candidate.implicit:
            command += f" --int8 --fp16 --calib={candidate.files['calibration.cache']}"
        elif caps.explicit.weak:
            command += " --fp16" if candidate.precision == "fp16" else " --int8 --fp16"
        elif caps.explicit.network_flags:
            command += " --stronglyTyped"
        if caps.explicit.weak or candidate.implicit:
            layers = [f'"{name}":{precision}' for name, precision in candidate.precisions.items()]
            if layers:
                command += f" --precisionConstraints=obey --layerPrecisions='{','.join(layers)}'"
        lines.append(command)
    return "\n".join(
        (
            f"# Candidates for {caps.name} {caps.version}",
            "",
            f"`trtdet finish` builds and times these and ships the fastest with {bound}.",
            "",
            candidates_table(candidates).markdown(),
            "",
            "Without Python, time each with trtexec in this folder, as the networks share `weights.bin`:",
            "",
            "```console",
            *lines,
            "```",
            "",
        )
    )
