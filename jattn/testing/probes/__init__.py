"""The claims, by topic: importing this registers them, in this order."""

# isort: off
from jattn.testing.probes import values as values
from jattn.testing.probes import arrays as arrays
from jattn.testing.probes import pairs as pairs
from jattn.testing.probes import gradients as gradients
from jattn.testing.probes import nonfinite as nonfinite
from jattn.testing.probes import lse as lse
from jattn.testing.probes import dtypes as dtypes
from jattn.testing.probes import sizes as sizes
from jattn.testing.probes import transforms as transforms
from jattn.testing.probes import dropout as dropout
