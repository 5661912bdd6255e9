"""What INT8 cost in mAP and gained in time, against the same model without it: figures and the sentences about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trtdet.backends import RunInfo
from trtdet.bundle import GuardPart
from trtdet.evaluation.comparison import Comparison
from trtdet.performance import Difference, Ratio

WORTH = "worth.json"
"""The file of a bundle that keeps the answer."""

GUARD = 1.02
"""How many times as fast as FP16 INT8 has to be where nobody says: NVIDIA's autotuner of Q/DQ placement keeps a model
without Q/DQ below the same figure (Model Optimizer 0.47, github.com/NVIDIA/Model-Optimizer, pull request 2318)."""

_SIZES = ("bytes", "file_bytes")
_NAMED = 8
"""How many convolutions the sentence names; the file has all."""


@dataclass(frozen=True)
class EngineFigures:
    """An engine as it is estimated.

    Attributes:
        ms: milliseconds of a run.
        bound_ms: the part of ``ms`` in kernels that are bound by ``memory``, by ``arithmetic`` and by their ``launch``.
        bytes: that a run reads and writes.
        kernels: that a run starts.
        file_bytes: of the engine's file.
    """

    ms: float
    bound_ms: Mapping[str, float]
    bytes: int
    kernels: int
    file_bytes: int


@dataclass(frozen=True)
class Estimated:
    """Both engines on a GPU's published rates: no measurement.

    Attributes:
        gpu: its name in the table of GPUs.
        batch: images at once.
        int8: the engine that was asked for.
        fp16: of the same model in FP16, in the form that suits FP16 best.
        cuda_graph: both are launched as one CUDA graph, rather than kernel by kernel, which takes longer.
    """

    gpu: str
    batch: int
    int8: EngineFigures
    fp16: EngineFigures
    cuda_graph: bool = True

    @property
    def ratio(self) -> float:
        """INT8's time as a multiple of FP16's, below 1 is faster."""
        return self.int8.ms / self.fp16.ms

    def __str__(self) -> str:
        """One sentence without a full stop."""
        return f"INT8 against FP16 ({self.basis}): {self.ratio:.2f}x the time, {self.sizes}"

    @property
    def basis(self) -> str:
        """What it is an estimate of, in words that fit into brackets."""
        launched = "" if self.cuda_graph else ", without CUDA graphs"
        return f"estimate for {self.gpu}, batch {self.batch}{launched}"

    @property
    def sizes(self) -> str:
        """What both move, and how large their files are."""
        moved, size = ([getattr(each, name) / 1e6 for each in (self.int8, self.fp16)] for name in _SIZES)
        return f"{moved[0]:.1f} MB moved against {moved[1]:.1f} MB, engine {size[0]:.1f} MB against {size[1]:.1f} MB"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "ratio": self.ratio, "said": str(self)}


@dataclass(frozen=True)
class Worth:
    """The answer.

    Attributes:
        against: precision of the bundle that was run as well, ``fp16`` or ``fp32``.
        run_info: where both ran; None where nothing was run.
        comparison: of their mAP; None where no annotated images were given.
        batch: images at once in ``latency``.
        latency: INT8's as a multiple of the other's, below 1 is faster; None where no engine can be run here.
        unmeasured: why there is no latency; empty where there is.
        slower: the convolutions that INT8 runs slower than the other, the worst first.
        estimate: of INT8 and FP16; None where the layers of the engines are not known.
        guard: what a bound on INT8's speed decided; None where none was given.
    """

    against: str
    run_info: RunInfo | None = None
    comparison: Comparison | None = None
    batch: int = 1
    latency: Ratio | None = None
    unmeasured: str = ""
    slower: tuple[Difference, ...] = ()
    estimate: Estimated | None = None
    guard: GuardPart | None = None

    def __str__(self) -> str:
        """A sentence on what was run, or on the estimate, and another where convolutions should be moved."""
        if self.run_info is None:
            return str(self.estimate or f"INT8 not compared with FP16, as {self.unmeasured}")
        estimate = str(self.estimate) if self.latency is None and self.estimate is not None else ""
        return ". ".join(part for part in (self._run_here(self.run_info), estimate, self.advice) if part)

    def _run_here(self, run_info: RunInfo) -> str:
        accuracy = "mAP not measured (give --val-images and --annotations)"
        if self.comparison is not None:
            found = self.comparison
            difference, low, high = (100 * share for share in (found.difference, found.low, found.high))
            accuracy = f"mAP {difference:+.2f} ({low:+.2f} .. {high:+.2f})"
        other = self.against.upper()
        time = f"latency not measured, as {self.unmeasured}"
        if self.latency is not None:
            ratio = self.latency
            time = f"latency {ratio.value:.2f}x of {other} ({ratio.low:.2f} .. {ratio.high:.2f}) at batch {self.batch}"
            if self.estimate is not None:
                time += f", {self.estimate.sizes}"
        said = f"INT8 against {other}: {accuracy}, {time}; on {run_info}"
        if self.latency is not None and self.latency.low > 1:
            said += f". INT8 is slower than {other} here"
        return said

    @property
    def advice(self) -> str:
        """Which convolutions to move, and how; empty where none is slower."""
        names = [name for layer in self.slower for name in layer.convs]
        if not names:
            return ""
        gain = sum(layer.gain_ms for layer in self.slower)
        listed = ",".join(names[:_NAMED])
        rest = f" and {len(names) - _NAMED} more, see {WORTH}" if len(names) > _NAMED else ""
        return f"Slower in INT8, by {gain:.3f} ms in all: --keep-fp16 {listed}{rest}"

    @property
    def speedup(self) -> float | None:
        """How many times as fast as FP16 INT8 is: measured, else estimated; None where neither is known."""
        if self.latency is not None:
            return 1 / self.latency.value
        return None if self.estimate is None else 1 / self.estimate.ratio

    @property
    def basis(self) -> str:
        """Where ``speedup`` comes from, in words that fit into brackets."""
        if self.latency is not None:
            return f"measured on {self._device}, batch {self.batch}"
        return "" if self.estimate is None else self.estimate.basis

    @property
    def _device(self) -> str:
        return self.run_info.device if self.run_info is not None else ""

    def guarded(self, least: float) -> Worth:
        """The same with what a bound on INT8's speed decides.

        Args:
            least: how many times as fast as FP16 INT8 has to be.
        """
        speedup = self.speedup
        if speedup is None:
            reason = f"INT8 could not be compared with FP16, as {self.unmeasured}"
            return replace(self, guard=GuardPart(shipped="int8", least=least, reason=reason))
        guard = GuardPart(
            shipped="int8" if speedup >= least else "fp16",
            least=least,
            speedup=speedup,
            how="estimated" if self.latency is None else "measured",
            on=self._device if self.latency is not None or self.estimate is None else self.estimate.gpu,
            batch=self.batch,
            reason=f"INT8 is {speedup:.2f} times as fast as FP16 ({self.basis}), and --guard asks for {least:g}",
        )
        return replace(self, guard=guard)

    @property
    def warning(self) -> str:
        """What to do where INT8 is not faster than FP16; empty where a bound has decided, or that is not known."""
        if self.guard is not None or self.speedup is None or self.speedup > 1:
            return ""
        return (
            f"INT8 is not faster than FP16 ({self.basis}: {1 / self.speedup:.2f}x the time); --guard {GUARD:g} ships "
            "FP16 where INT8 does not pay; 'trtdet audit --gpu NAME' shows what bounds it and what gets in its way"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, comparison=None, estimate=None, guard=None))
        del plain["run_info"]
        return {
            **plain,
            "said": str(self),
            "advice": self.advice,
            "ran_on": str(self.run_info) if self.run_info is not None else None,
            "comparison": self.comparison.as_dict() if self.comparison is not None else None,
            "speedup": self.speedup,
            "estimate": self.estimate.as_dict() if self.estimate is not None else None,
            "guard": self.guard.model_dump() if self.guard is not None else None,
        }
