"""Which claims about edge cases hold of whose attention: a table of Markdown."""

import difflib
import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from experiments.config import ConfigError
from jattn.testing import Conformance, conformance

Attention = Callable[..., Any]


def _flax(module: str) -> Attention:
    return import_module(module).dot_product_attention


def _torch() -> Attention:
    """PyTorch's function behind numpy arrays: forwards only."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def to_torch(array: Any) -> Any:
        if array.dtype == jnp.bfloat16:
            return torch.tensor(np.asarray(array, np.float32)).to(torch.bfloat16)
        return torch.tensor(np.asarray(array))

    def attend(
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> np.ndarray:
        given = [x for x in (mask, bias) if x is not None]
        if len(given) + is_causal > 1:
            raise NotImplementedError(
                "torch: mask, bias and is_causal exclude one another, but got several. "
                "Join them into one bias."
            )
        q, k, v = (to_torch(x).swapaxes(-3, -2) for x in (query, key, value))
        try:
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=to_torch(given[0]) if given else None,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=q.shape[-3] != k.shape[-3],
            )
        except RuntimeError as error:  # how torch refuses shapes and dtypes
            raise ValueError(str(error)) from None
        exact = out.float() if out.dtype == torch.bfloat16 else out
        return exact.swapaxes(-3, -2).numpy().astype(query.dtype)

    return attend


FUNCTIONS: dict[str, Callable[[], Attention]] = {
    "jattn": lambda: jattn.attention,
    "jattn:blockwise": lambda: functools.partial(
        jattn.attention, implementation="blockwise", block_sizes=(4, 8)
    ),
    "jattn.dot_product_attention": lambda: jattn.dot_product_attention,
    "jattn.attention_fn": lambda: jattn.attention_fn,
    "jax.nn": lambda: jax.nn.dot_product_attention,
    "flax.nnx": functools.partial(_flax, "flax.nnx"),
    "flax.linen": functools.partial(_flax, "flax.linen"),
    "torch": _torch,
}
USUAL = ("jattn", "jax.nn", "flax.nnx", "flax.linen", "torch")
MARKS = {"wrong": "**wrong**", "not offered": "-"}


def hold(
    names: Sequence[str], progress: Callable[[str], None]
) -> dict[str, Conformance]:
    """The report of each function by its name; all usual ones that are installed.

    Args:
        names: of the functions; none means the usual ones.
        progress: told whose turn it is.

    Raises:
        ConfigError: a function is unknown or not installed.
    """
    reports = {}
    for name in names or USUAL:
        if name not in FUNCTIONS:
            near = difflib.get_close_matches(name, FUNCTIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(FUNCTIONS)
            raise ConfigError(f"{name!r} is not among {known}{hint}")
        try:
            function = FUNCTIONS[name]()
        except ModuleNotFoundError as error:
            if names:
                raise ConfigError(f"{name}: {error.name} is not installed") from None
            continue
        progress(name)
        reports[name] = conformance(function)
    return reports


def table(reports: dict[str, Conformance], everything: bool = False) -> str:
    """A row for each claim, a column for each function, totals last; Markdown.

    Args:
        reports: by the names of the functions.
        everything: whether to list the claims, too, of which no function is wrong.
    """
    lines = [["topic", "claim", *reports], ["---"] * (len(reports) + 2)]
    claims = list(zip(*reports.values(), strict=True))
    for found in claims:
        if everything or any(finding.verdict == "wrong" for finding in found):
            marks = [MARKS.get(finding.verdict, finding.verdict) for finding in found]
            lines.append([found[0].topic, found[0].check, *marks])
    totals = [
        f"{len(report.wrong)} of {sum(x.verdict != 'not offered' for x in report)}"
        for report in reports.values()
    ]
    hidden = len(claims) - len(lines) + 2
    more = f"and {hidden} more, of which none is wrong; " if hidden else ""
    lines.append(["", f"{more}wrong of those offered", *totals])
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{rows}\n\n{_legend(reports)}"


def _legend(reports: dict[str, Conformance]) -> str:
    packages = {"jax", *(name.split(".")[0].split(":")[0] for name in reports)}
    versions = ", ".join(
        f"{name} {import_module(name).__version__}" for name in sorted(packages)
    )
    return (
        f"{versions}. refused: the call has no clear meaning and was answered by a "
        "clear error, which is right; -: not offered."
    )
