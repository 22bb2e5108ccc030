"""The logical axes of every parameter, by which a mesh shards a model.

Names are metadata of the parameters, in Flax's own way:

    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    rules = dict(heads="model", kv_heads="model", mlp="model", vocab="model")
    params = nnx.state(model, nnx.Param)
    with nnx.logical_axis_rules([(x, rules.get(x)) for x in jattn.nnx.AXIS_NAMES]):
        places = nnx.get_named_sharding(params, mesh)
    nnx.update(model, jax.device_put(params, places))

The axes of the mesh are of the type Auto, as those of `jax.sharding.Mesh` are.
"""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

AXES = {
    "embedding": ("vocab", "embed"),
    "position_embedding": ("length", "embed"),
    "head.kernel": ("embed", "vocab"),
    "query.kernel": ("embed", "heads", "head_dim"),
    "query.bias": ("heads", "head_dim"),
    "key.kernel": ("embed", "kv_heads", "head_dim"),
    "key.bias": ("kv_heads", "head_dim"),
    "value.kernel": ("embed", "kv_heads", "head_dim"),
    "value.bias": ("kv_heads", "head_dim"),
    "query_ln.scale": ("head_dim",),
    "key_ln.scale": ("head_dim",),
    "qk_scale": ("heads",),
    "sinks": ("heads",),
    "out.kernel": ("heads", "head_dim", "embed"),
    "out.bias": ("embed",),
    "gate.kernel": ("embed", "mlp"),
    "gate.bias": ("mlp",),
    "up.kernel": ("embed", "mlp"),
    "up.bias": ("mlp",),
    "down.kernel": ("mlp", "embed"),
    "down.bias": ("embed",),
    "norm.scale": ("embed",),
    "norm.bias": ("embed",),
}
"""The axes of a parameter, by the last two names of its path; `attention_norm` and all
other norms are "norm", and `cross_attention` is "attention". Stacked layers have
"layers" before them."""

AXIS_NAMES = tuple(sorted({name for axes in AXES.values() for name in axes}))
AXIS_NAMES += ("layers",)
"""Every name, for rules that must mention all."""


def names_axes(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that checks its rngs, and names the axes of the parameters.

    They are names, no more: a model is made without a mesh, or within any.
    """

    @functools.wraps(init)
    def named(self: nnx.Module, *args: Any, **kwargs: Any) -> None:
        if "rngs" in kwargs:
            check_rngs(type(self).__name__, kwargs["rngs"])
        with nnx.use_eager_sharding(False):
            init(self, *args, **kwargs)
        for path, node in nnx.iter_graph(self):
            if isinstance(node, nnx.Param) and not node.has_metadata("out_sharding"):
                if axes := _axes_of(path):
                    node.set_metadata(out_sharding=axes)

    return named


def check_rngs(caller: str, rngs: Any) -> None:
    """Raises TypeError unless they are `nnx.Rngs`."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"{caller}: rngs must be nnx.Rngs, but got {type(rngs).__name__}. Make it "
            "with nnx.Rngs(seed)."
        )


def _axes_of(path: tuple[Any, ...]) -> tuple[str, ...] | None:
    *parents, name = map(str, path)
    parent = parents[-1] if parents else ""
    parent = "norm" if parent.endswith("_norm") else parent
    return AXES.get(f"{parent}.{name}", AXES.get(name))
