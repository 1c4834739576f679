"""Where parameters meet activations: computed in the activations' type, with gradients in the parameters' own.

A gradient sums over all positions of a batch, on all devices. Cast to 16 bit before that sum is complete, as the
transpose of a cast would have it, it would lose what small contributions add.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def product(x: jax.Array, w_DE: jax.Array) -> jax.Array:
    """`[..., D]` to `[..., E]` in the type of `x`."""
    return jnp.dot(x, w_DE.astype(x.dtype))


def _product_forward(x: jax.Array, w_DE: jax.Array):
    return product(x, w_DE), (x, w_DE)


def _product_backward(saved, gradient: jax.Array):
    x, w_DE = saved
    leading = tuple(range(x.ndim - 1))
    w_gradient_DE = jnp.tensordot(x, gradient, (leading, leading), preferred_element_type=w_DE.dtype)
    return jnp.dot(gradient, w_DE.astype(x.dtype).T), w_gradient_DE


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Rows of the embedding table. Its gradient is a matrix product: XLA runs the scatter row by row on CPUs."""
    return jnp.take(table_VD, tokens_BT, axis=0)


def _lookup_forward(table_VD: jax.Array, tokens_BT: jax.Array):
    return lookup(table_VD, tokens_BT), (table_VD, tokens_BT)


def _lookup_backward(saved, gradient_BTD: jax.Array):
    table_VD, tokens_BT = saved
    one_hot_BTV = jax.nn.one_hot(tokens_BT, table_VD.shape[0], dtype=gradient_BTD.dtype)
    return jnp.einsum("BTV,BTD->VD", one_hot_BTV, gradient_BTD).astype(table_VD.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)
