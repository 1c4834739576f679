"""What one process of a test session has compiled, the others read: a folder for JAX's compilation cache."""

from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def read_from(folder: Path | None) -> None:
    """This process compiles through the folder from here on, or no longer through any."""
    jax.config.update("jax_compilation_cache_dir", str(folder) if folder else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0 if folder else 1)
    compilation_cache.reset_cache()  # it is opened once, and would serve the tests of other files too


def environment(folder: Path) -> dict[str, str]:
    """The same for a program that is started."""
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
