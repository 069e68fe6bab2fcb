"""Losses with convolutions, by every option that they have."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax

from jax_programs import IMAGE, program, square


@program({"k": "convolution", "b": "elementwise"}, dict(k=(3, 2, 5), b=(5,)), (7, 2))
def conv_1d(p, x):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x[None], p["k"], (2,), "SAME", dimension_numbers=numbers)
    return square(jnp.tanh(y + p["b"]))


@program("convolution", dict(k=(3, 3, 2, 4), v=(2, 2, 4, 3)), (7, 6, 2))
def conv_2d(p, x):
    conv = partial(lax.conv_general_dilated, dimension_numbers=IMAGE)
    y = jnp.tanh(conv(x[None], p["k"], (2, 1), [(1, 2), (0, 1)]))
    return square(conv(y, p["v"], (1, 1), "VALID", rhs_dilation=(1, 2)))


@program("convolution", dict(k=(4, 2, 3, 2)), (2, 6, 5))
def conv_2d_as_torch(p, x):
    return square(jnp.tanh(lax.conv(x[None], p["k"], (1, 2), "SAME")))


@program("convolution", dict(k=(2, 3, 2, 2, 3)), (4, 5, 3, 2))
def conv_3d(p, x):
    numbers = ("NDHWC", "DHWIO", "NDHWC")
    y = lax.conv_general_dilated(x[None], p["k"], (1, 2, 1), "SAME", dimension_numbers=numbers)
    return square(jnp.tanh(y))


@program("convolution", dict(k=(3, 3, 2, 4)), (4, 4, 2))
def conv_transposed(p, x):
    return square(jnp.tanh(lax.conv_transpose(x[None], p["k"], (2, 2), "SAME")))


@program("convolution", dict(k=(3, 3, 2, 6)), (5, 5, 4))
def conv_in_groups(p, x):
    how = dict(feature_group_count=2, dimension_numbers=IMAGE)
    return square(jnp.tanh(lax.conv_general_dilated(x[None], p["k"], (1, 1), "SAME", **how)))


@program("convolution", dict(k=(3, 3, 1, 8)), (5, 5, 4))
def conv_depthwise(p, x):
    how = dict(feature_group_count=4, dimension_numbers=IMAGE)
    return square(jnp.tanh(lax.conv_general_dilated(x[None], p["k"], (2, 1), "SAME", **how)))


@program("convolution", dict(k=(3, 3, 2, 4)), (5, 2, 6, 2))
def conv_with_odd_axes(p, x):
    numbers = ("HNWC", "HWIO", "CHNW")
    y = lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=numbers)
    return square(jnp.tanh(y))


@program("convolution", dict(k=(4, 2, 3, 2)), (2, 5, 3, 7))
def conv_with_axes_in_another_order_each(p, x):
    numbers = ("CHNW", "OIWH", "HCWN")
    y = lax.conv_general_dilated(x, p["k"], (1, 2), "SAME", dimension_numbers=numbers)
    return square(jnp.tanh(y))


@program("convolution", dict(k=(3, 3, 4, 4)), (5, 5, 4))
def conv_in_scan(p, x):
    conv = partial(lax.conv_general_dilated, dimension_numbers=IMAGE)
    step = lambda x, _: (jnp.tanh(conv(x, p["k"], (1, 1), "SAME")), None)
    return square(lax.scan(step, x[None], None, length=3)[0])


@program("convolution", dict(k=(2, 3, 3, 4, 4)), (5, 5, 4))
def conv_over_layers(p, x):
    conv = partial(lax.conv_general_dilated, dimension_numbers=IMAGE)
    step = lambda x, k: (jnp.tanh(conv(x, k, (1, 1), "SAME")), None)
    return square(lax.scan(step, x[None], p["k"])[0])


@program("convolution", dict(k=(2, 3, 3, 1, 4)), (5, 5, 4))
def conv_depthwise_over_layers(p, x):
    conv = partial(lax.conv_general_dilated, dimension_numbers=IMAGE, feature_group_count=4)
    step = lambda x, k: (jnp.tanh(conv(x, k, (1, 1), "SAME")), None)
    return square(lax.scan(step, x[None], p["k"])[0])


WIDE = ("NWC", "WIO", "NWC")


@program("convolution", dict(k=(3, 2, 4)), (4, 7, 2))
def conv_with_batch_groups(p, x):
    how = dict(batch_group_count=2, dimension_numbers=WIDE)
    return square(jnp.tanh(lax.conv_general_dilated(x, p["k"], (1,), "SAME", **how)))


@program("convolution", dict(k=(6, 2, 3, 2)), (2, 5, 6, 7))
def conv_with_batch_groups_and_odd_axes(p, x):
    how = dict(batch_group_count=3, dimension_numbers=("CHNW", "OIWH", "HCWN"))
    y = lax.conv_general_dilated(x, p["k"], (2, 1), "VALID", rhs_dilation=(1, 2), **how)
    return square(jnp.tanh(y))


@program("convolution", dict(k=(3, 3, 4, 2)), (4, 4, 2))
def conv_transposed_with_the_kernel_of_a_conv(p, x):
    how = dict(padding="SAME", transpose_kernel=True, dimension_numbers=IMAGE)
    return square(jnp.tanh(lax.conv_transpose(x[None], p["k"], (2, 2), **how)))


@program("convolution", dict(k=(3, 1, 4)), (7, 4))
def conv_depthwise_with_a_flipped_kernel(p, x):
    how = dict(feature_group_count=4, dimension_numbers=WIDE)
    y = lax.conv_general_dilated(x[None], jnp.flip(p["k"], 0), (1,), [(2, -1)], **how)
    return square(jnp.tanh(y))


@program("whole", dict(k=(2, 1, 3, 2)), (7, 4))
def conv_in_groups_whose_outputs_are_in_another_order(p, x):
    kernel = p["k"].transpose(2, 1, 3, 0).reshape(3, 1, 4)
    how = dict(feature_group_count=4, dimension_numbers=WIDE)
    return square(jnp.tanh(lax.conv_general_dilated(x[None], kernel, (1,), "SAME", **how)))


@program("convolution", dict(k=(3, 1, 4)), (2, 4))
def conv_in_groups_with_no_places(p, x):
    how = dict(feature_group_count=4, dimension_numbers=WIDE)
    return square(lax.conv_general_dilated(x[None], p["k"], (1,), "VALID", **how)) + square(x[0])


@program("convolution", dict(k=(5, 2, 3)), (7, 2))
def conv_with_a_part_of_a_kernel(p, x):
    conv = partial(lax.conv_general_dilated, dimension_numbers=WIDE)
    y = conv(x[None], p["k"][1:4], (1,), [(1, 2)], lhs_dilation=(2,))
    return square(jnp.tanh(y)) + square(conv(x[None], p["k"][:, :, :2], (1,), "SAME"))


@program("convolution", dict(k=(3, 2, 3), v=(3, 2, 1)), (7, 2))
def conv_with_two_kernels_in_one(p, x):
    both = jnp.concatenate([p["k"], jnp.flip(p["v"], 1)], -1)
    return square(jnp.tanh(lax.conv_general_dilated(x[None], both, (1,), "SAME", None, None, WIDE)))
