"""What a device can do at best: the facts that rooflines and MFU are measured against."""

import dataclasses
import time

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip: bytes and bytes a second of its memory, bfloat16 operations a second, links to its neighbours.

    Memory and operations: the tables at cloud.google.com/tpu/docs/v4, v5e, v5p and v6e. Links: bytes a second of one
    link in one direction, from *How to Scale Your Model* (jax-ml.github.io/scaling-book/tpus); an axis of the pod is
    a ring only from `ring` chips on, below that the link back is missing.
    """

    memory: int
    bandwidth: float
    peak: float
    link: float
    ring: int


CHIPS = {
    "v4": Chip(32 * 2**30, 1.228e12, 275e12, 45e9, 4),
    "v5e": Chip(16 * 2**30, 0.819e12, 197e12, 45e9, 16),
    "v5p": Chip(95 * 2**30, 2.765e12, 459e12, 90e9, 4),
    "v6e": Chip(32 * 2**30, 1.640e12, 918e12, 90e9, 16),
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
