"""What the compiler is asked for: the one place that knows which backend runs."""

import functools
from collections.abc import Callable

import jax

# Products of a few rows with a matrix: XLA's CPU backend gives them to YNNPACK, but from about 8 rows on Eigen is
# faster. Sums and maxima stay with YNNPACK, which is faster at those.
CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


@functools.cache
def compiler_options() -> dict[str, str]:
    """Options for `jax.jit` of code that decodes; none where this backend or this release has no such option."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=CPU_OPTIONS).lower(0.0).compile()
    except Exception:  # the compiler's own error types differ between releases
        return {}
    return dict(CPU_OPTIONS)


def jit_for_decoding(**options) -> Callable[[Callable], Callable]:
    """`jax.jit` with `compiler_options()`, as a decorator.

    They are asked for at the first call: importing a module must not start a backend (several hosts connect first).
    The function's `compiled()` is what `jax.jit` returned.
    """

    def decorate(function: Callable) -> Callable:
        compiled = functools.cache(lambda: jax.jit(function, compiler_options=compiler_options(), **options))

        @functools.wraps(function)
        def call(*args, **kwargs):
            return compiled()(*args, **kwargs)

        call.compiled = compiled
        return call

    return decorate
