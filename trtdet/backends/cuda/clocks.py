"""The clocks, temperature and power of a device, as NVML reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Clocks:
    """The state of a device; None for a figure that it does not report.

    Attributes:
        sm_mhz, memory_mhz: clocks now.
        sm_max_mhz, memory_max_mhz: the highest that the device has.
        temperature_c: in degrees Celsius.
        power_w: in watts.
        throttled: why the clocks are held back, in words; empty where they are not, or where it is only idle.
    """

    sm_mhz: int | None
    sm_max_mhz: int | None
    memory_mhz: int | None
    memory_max_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttled: tuple[str, ...]


_REASONS = {
    0x2: "application clocks are set",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit of the software",
    0x40: "thermal limit of the hardware",
    0x80: "power brake",
    0x100: "display clocks are set",
}
"""nvmlClocksEventReason* in nvml.h; 0x1 is idleness, which is none."""


def read_clocks(nvml: Any, handle: Any) -> Clocks:
    def told(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    # It was renamed in 2023; drivers before that know it only by its old name.
    reasons = told("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    power = told("nvmlDeviceGetPowerUsage")
    return Clocks(
        told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        told("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        told("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        told("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        None if power is None else power / 1000,
        tuple(words for bit, words in _REASONS.items() if reasons & bit),
    )
