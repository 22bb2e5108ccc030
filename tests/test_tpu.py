"""What a TPU would run, compiled ahead of time where there is none.

Memory and programs are the compiler's word, not measurements. All of it takes about
half a minute on one core.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from test_letters import COLLECTIVES

import jattn
from experiments.studies.planned import TPU_ENVIRONMENT
from jattn import masks

pytestmark = pytest.mark.slow
pytest.importorskip(
    "libtpu", reason="libtpu, the compiler, comes with: pip install -e '.[tpu-aot]'"
)

N, H = 2, 128


@pytest.fixture(scope="module")
def devices_of():
    """Four devices of a generation, by its name; the first call loads libtpu."""

    def devices_of(generation):
        name = f"{generation}:2x2"
        return get_topology_desc(platform="tpu", topology_name=name).devices

    with pytest.MonkeyPatch.context() as patch:
        for name, value in TPU_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield devices_of


def attend(q, k, v, ids=None):
    mask = masks.causal() if ids is None else masks.causal() & masks.segments(ids)
    return jattn.attention(q, k, v, mask=mask, implementation="blockwise")


def gradient(q, k, v, cotangent, ids=None):
    return jax.vjp(lambda *x: attend(*x, ids), q, k, v)[1](cotangent)


def program(derivative, kind, batch, length, vectors, ids=None):
    """Compiled for the devices of the shardings of the vectors and of the ids."""
    fn, count = {"forward": (attend, 3), "gradient": (gradient, 4)}[derivative]
    shape = (batch, length, N, H)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=vectors)] * count
    if kind == "packed":
        arguments.append(jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=ids))
    return jax.jit(fn).lower(*arguments).compile()


@pytest.mark.parametrize(
    ("generation", "derivative", "kind"),
    [
        ("v5e", "forward", "causal"),
        ("v5e", "gradient", "packed"),
        ("v6e", "forward", "causal"),
        ("v6e", "gradient", "causal"),
    ],
)
def test_memory_is_linear_in_length(generation, derivative, kind, devices_of):
    one = SingleDeviceSharding(devices_of(generation)[0])
    small, large = 4096, 16384
    compiled = [program(derivative, kind, 1, n, one, one) for n in (small, large)]
    peaks = [x.memory_analysis().peak_memory_in_bytes for x in compiled]
    assert math.log(peaks[1] / peaks[0]) / math.log(large / small) <= 1.05
    # And no array has as many elements as the scores of one head.
    shapes = re.findall(r"\b[a-z]+\d*\[(\d[\d,]*)\]", compiled[1].as_text())
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert large * N * H <= max(sizes) < large**2


def test_batch_and_heads_on_a_mesh_need_no_collective(devices_of):
    mesh = Mesh(np.array(devices_of("v5e")).reshape(2, 2), ("data", "model"))
    vectors = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
    compiled = program("gradient", "causal", 4, 2048, vectors)
    assert not re.findall(COLLECTIVES, compiled.as_text())
    assert all(x.is_equivalent_to(vectors, 4) for x in compiled.output_shardings)
