"""What can be set in an experiment: one field for each setting, with its rule.

The comment on the line of a field, or on the lines above it, is its help text on the
command line.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Rule:
    """A condition on the values of a field, and the words for it."""

    holds: Callable[[Any], bool]
    text: str


Count = Annotated[int, Rule(lambda n: n >= 1, "must be at least 1")]
NotNegative = Annotated[int, Rule(lambda n: n >= 0, "must not be negative")]
Even = Annotated[
    int, Rule(lambda n: n >= 2 and n % 2 == 0, "must be even (RoPE rotates pairs)")
]
Seed = Annotated[int, Rule(lambda n: 0 <= n < 2**31, "must be from 0 to 2**31 - 1")]
Positive = Annotated[float, Rule(lambda x: x > 0, "must be positive")]
ZeroOrMore = Annotated[float, Rule(lambda x: x >= 0, "must not be negative")]
Cap = Annotated[
    float, Rule(lambda x: x == 0 or 1e-9 <= x <= 1e30, "must be 0 or from 1e-9 to 1e30")
]
Share = Annotated[float, Rule(lambda x: 0 < x < 1, "must be between 0 and 1")]
ShareOrZero = Annotated[float, Rule(lambda x: 0 <= x < 1, "must be in [0, 1)")]
Name = Annotated[
    str,
    Rule(
        lambda s: bool(re.fullmatch(r"\w([\w.-]*[\w-])?", s)),
        "must be a file name that ends in no dot",
    ),
]
Text = Annotated[str, Rule(lambda s: s != "", "must not be empty")]
TokenizerName = Annotated[
    str,
    Rule(
        lambda s: bool(re.fullmatch(r"bytes|bpe:[0-9]+|.+\.json", s)),
        "must be bytes, bpe:SIZE or the path of a tokenizer.json",
    ),
    Rule(
        lambda s: (
            not re.fullmatch(r"bpe:[0-9]+", s)
            or (len(s) < 15 and 256 < int(s[4:]) < 2**31)
        ),
        "must have a size above 256, for the bytes are tokens of it, and below 2**31",
    ),
]
Scale = Literal["sqrt", "none", "inv", "init"]


@dataclass(frozen=True)
class Data:
    """The text, cut into tokens: its bytes, unless another tokenizer is named."""

    source: Text = "shakespeare"  # shakespeare, stdlib, or the path or glob of a text
    # bytes, bpe:SIZE, learned here, or the path of a Hugging Face tokenizer.json
    tokenizer: TokenizerName = "bytes"
    context: Count = 64  # tokens in a window
    batch: Count = 16  # windows in a batch
    validation_fraction: Share = 0.1  # share of the text, at its end, never trained on


@dataclass(frozen=True)
class Model:
    """A causal transformer; d_k and d_v do not depend on d_model."""

    layers: Count = 2  # transformer blocks
    d_model: Count = 64  # width of the residual stream
    heads: Count = 2  # attention heads of a layer
    d_k: Even = 16  # size of a query or key of one head
    d_v: Count = 32  # size of a value of one head
    d_ff: Count = 256  # hidden width of the feed-forward layer
    # logits times 1/sqrt(d_k), 1, 1/d_k, or 1/sqrt(d_k) in the init
    scale: Scale = "sqrt"
    init: Literal["lecun", "gpt2"] = "lecun"  # std of weights: 1/sqrt(fan in), or 0.02
    qk_norm: bool = False  # normalise queries and keys
    # what tells tokens apart by their place
    positions: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"
    soft_cap: Cap = 0.0  # logits s become cap tanh(s / cap); 0: they stay as they are
    log_n: bool = False  # logits times ln(keys seen) / ln(context)
    # of the computation; parameters and moments are float32
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Optim:
    """AdamW or SGD with linear warm-up and cosine decay."""

    name: Literal["adamw", "sgd"] = "adamw"  # the rule of the updates
    lr: Positive = 3e-3  # peak learning rate
    steps: Count = 360  # updates
    warmup_fraction: ShareOrZero = 0.05  # share of the steps that warm up; 0: none
    b1: ShareOrZero = 0.9  # decay of the mean of gradients; of SGD's sum, its momentum
    b2: ShareOrZero = 0.99  # decay of the mean of squared gradients
    # decoupled decay per step, in units of the learning rate
    weight_decay: ZeroOrMore = 0.0
    clip_norm: Positive = 1.0  # largest global gradient norm
    accumulate: Count = 1  # parts of a batch that are computed one after another


@dataclass(frozen=True)
class Evaluation:
    """Measurement of the validation loss."""

    tokens: Count = 16384  # size of the fixed evaluation set, at least


@dataclass(frozen=True)
class Logging:
    """What a run writes while it trains."""

    every: Count = 20  # steps between lines of metrics.jsonl
    checkpoint_every: Count = 100  # steps between checkpoints
    watch: NotNegative = 0  # steps between looks at attention (watch.jsonl); 0: none
    # a watched head whose entropy / ln n is below is named; 0: never
    alarm_entropy: ShareOrZero = 0.05
    # a watched head with a larger logit is named; 0: never
    alarm_logit: ZeroOrMore = 50.0
    # where to write the metrics besides metrics.jsonl
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    profile: NotNegative = 0  # steps, after the first, that are traced; 0: none


@dataclass(frozen=True)
class Probe:
    """Statistics of attention rows before and after training."""

    batch: Count = 16  # windows that are probed
    dead_below: Positive = 1e-3  # a row is dead if (gradient norm x B x T) is below
    saturated_above: Share = 0.99  # a row is saturated if its largest weight is above


@dataclass(frozen=True)
class Theory:
    """Softmax of independent normal logits: exact integrals against simulation."""

    d_k: tuple[Count, ...] = (16, 64, 256, 1024)  # key sizes
    keys: Count = 64  # keys a query sees
    # wanted standard error of the simulation over its value
    relative_error: Share = 0.01
    seed: Seed = 0  # of the simulation


@dataclass(frozen=True)
class Coord:
    """Coordinate check: how the std of the logits grows with d_k, after a few steps."""

    d_k: tuple[Even, ...] = (16, 64, 256, 1024)  # key sizes
    steps: tuple[NotNegative, ...] = (0, 1, 4, 16)  # updates before measuring
    lr: Positive = 3e-3  # constant learning rate
    # arms, as in model.scale
    scales: tuple[Scale, ...] = ("none", "sqrt", "inv", "init")
    seeds: Count = 1  # runs to average over


@dataclass(frozen=True)
class Config:
    """One experiment. Runs go to <out>/<name>/<id>/."""

    name: Name = "run"  # directory of the experiment, inside out
    seed: Seed = 0  # of the initial weights and of the order of the data
    out: Text = "runs"  # directory of all experiments
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()
    probe: Probe = Probe()
    theory: Theory = Theory()
    coord: Coord = Coord()


Peer = Literal["reference", "jax.nn", "jax.nn:cudnn", "flax.nnx", "torch"]
MaskName = Literal["causal", "full", "window", "packed"]
Pass = Literal["forward", "forward + backward"]


@dataclass(frozen=True)
class HeadSize:
    """Other head sizes, at one length."""

    sizes: tuple[Count, ...] = (128,)  # sizes of one head
    length: Count = 2048  # queries, and keys
    peers: tuple[Peer, ...] = ("jax.nn", "torch")  # what is compared here


@dataclass(frozen=True)
class HeadCount:
    """The same width in few large heads or many small ones, at one length."""

    counts: tuple[Count, ...] = (1, 2, 4, 8, 16)  # heads; each must divide the width
    width: Count = 512  # heads times the size of one
    length: Count = 1024  # queries, and keys
    peers: tuple[Peer, ...] = ("jax.nn", "torch")  # what is compared here


@dataclass(frozen=True)
class Cost:
    """Time and memory of blockwise against its peers. Results go to <out>/<name>/."""

    name: Name = "cost"  # directory of the results, inside out
    out: Text = "runs"  # directory of all experiments
    seed: Seed = 0  # of the inputs
    threads: NotNegative = 1  # CPU threads; 0: as many as there are
    dtype: Literal["float32", "bfloat16"] = "float32"  # of queries, keys and values
    # what blockwise is compared with
    peers: tuple[Peer, ...] = ("reference", "jax.nn", "flax.nnx", "torch")
    # which keys a query sees
    masks: tuple[MaskName, ...] = ("causal", "full", "window", "packed")
    # what is timed and compared: outputs, or gradients as well
    passes: tuple[Pass, ...] = ("forward", "forward + backward")
    lengths: tuple[Count, ...] = (512, 2048, 8192)  # queries, and keys, that are timed
    memory_lengths: tuple[Count, ...] = (32768,)  # that are compiled, but not run
    memory_peers: tuple[Peer, ...] = ("jax.nn",)  # by whom; reference compiles for long
    batch: Count = 1  # sequences
    heads: Count = 1  # query heads, and key heads
    head_dim: Count = 64  # size of one head
    window: Count = 256  # keys a query sees with mask window, its own included
    documents: Count = 12  # documents in a sequence with mask packed
    tile: NotNegative = 0  # queries, and keys, of a tile of blockwise; 0: its default
    check_length: Count = 512  # where values are compared with those of reference
    rounds: Count = 5  # times a pair is measured
    round_seconds: Positive = 0.3  # if a round takes longer, there are three at most
    sample_ms: Positive = 20.0  # short calls are repeated to fill one timed sample
    call_limit_s: Positive = 10.0  # what takes longer for one call is not timed
    minutes: Positive = 60.0  # what has not begun by then is left out
    memory_limit_gb: Positive = 0.9  # what needs more memory is not run
    head_size: HeadSize = HeadSize()
    head_count: HeadCount = HeadCount()


@dataclass(frozen=True)
class Decode:
    """Time of a step of decoding against jax.nn. Results go to <out>/<name>/."""

    name: Name = "decode"  # directory of the results, inside out
    out: Text = "runs"  # directory of all experiments
    seed: Seed = 0  # of the inputs
    threads: NotNegative = 1  # CPU threads; 0: as many as there are
    dtype: Literal["float32", "bfloat16"] = "float32"  # of queries, keys and values
    batch: Count = 8  # sequences
    heads: Count = 32  # query heads; a multiple of kv_heads
    kv_heads: Count = 8  # key heads
    head_dim: Count = 128  # size of one head
    capacity: Count = 8192  # slots of the cache
    filled: tuple[Count, ...] = (1024, 4096, 8192)  # tokens in it, the newest included
    rounds: Count = 5  # times a pair is measured
    sample_ms: Positive = 20.0  # short calls are repeated to fill one timed sample
