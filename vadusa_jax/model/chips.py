"""What a device can do at best: the facts that rooflines and MFU are measured against."""

import dataclasses
import time

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Chip:
    """Bytes a second of the chip's memory and bfloat16 operations a second (cloud.google.com/tpu/docs, per chip)."""

    bandwidth: float
    peak: float


CHIPS = {
    "v4": Chip(1.228e12, 275e12),
    "v5e": Chip(0.819e12, 197e12),
    "v5p": Chip(2.765e12, 459e12),
    "v6e": Chip(1.640e12, 918e12),
}
_TPUS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}  # device_kind
_GPU_PEAKS = {  # dense bfloat16 operations a second (NVIDIA's data sheets), by a part of device_kind
    **{"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "L4": 121e12},
}


def peak_flops(device: jax.Device) -> float | None:
    """Operations a second that the device can do at best, None if nobody knows; a CPU is measured."""
    if device.platform == "cpu":
        # Virtual CPU devices share the machine: each can do its part.
        return measure_matmul_flops() / jax.local_device_count()
    if device.device_kind in _TPUS:
        return CHIPS[_TPUS[device.device_kind]].peak
    return next((peak for part, peak in _GPU_PEAKS.items() if part in device.device_kind), None)


def measure_matmul_flops(size: int = 1024, repeats: int = 10) -> float:
    """Operations a second of one large float32 matrix product on the default device, the best of a few."""
    a, seconds = jnp.ones((size, size)), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(_matmul(a, a))
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds[1:])


_matmul = jax.jit(jnp.matmul)
