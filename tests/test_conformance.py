"""The suite finds what is wrong, and nothing else."""

import functools

import jax
import numpy as np
import oracle
import pytest
from planted import FAULTS, textbook

import jattn
from jattn.testing import Conformance, Finding, conformance
from jattn.testing.features import Features
from jattn.testing.probe import PROBES
from jattn.testing.subject import Subject

BLOCKWISE = functools.partial(
    jattn.attention, implementation="blockwise", block_sizes=(4, 8)
)
SOME = [
    "a query without keys gets zero",
    "NaN in a masked value reaches no gradient",
    "NaN in the future stays there",
]
"""Claims at which others fail."""

JAX_FAILS = [
    "a query without keys gets zero",
    "a bias of minus infinity is a mask",
    "a mask of two axes is not guessed",
    "a Boolean bias is not added",
    "a negative window is refused",
    "NaN in a masked value stays there",
    "lse of a query without keys is minus infinity",
    "integer vectors are refused",
    "float64 is computed in float64",
]


@pytest.fixture(scope="module", autouse=True)
def compiled_sooner():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jattn.testing.subject.quick_jit", oracle.jit)
        yield


def assert_right(report):
    assert not report.wrong, str(report)


def supported(name):
    """What a planted function offers: what the claim needs."""
    return [x for need in PROBES[name].needs for x in need.split("|")]


TRANSFORMS = {"grad", "jvp", "hvp", "vmap", "jit"}
DEAR = [name for name in FAULTS if TRANSFORMS & set(supported(name))]
CHEAP = [name for name in FAULTS if name not in DEAR]


def test_a_right_function_of_numpy_is_right_about_all_that_it_offers():
    report = conformance(textbook)
    assert_right(report)
    assert {found.check for found in report if found.verdict == "not offered"} == {
        name for name in DEAR if supported(name) not in (["jit"], [])
    } | {"the slopes of a score rule are learned", "jit changes nothing"}


def test_every_claim_has_a_planted_fault():
    assert list(FAULTS) == list(PROBES)


@pytest.mark.parametrize("name", CHEAP)
def test_a_planted_fault_turns_its_claim_wrong(name):
    report = conformance(FAULTS[name], supports=supported(name), only=[name])
    assert report[name].verdict == "wrong", report


@pytest.mark.slow
@pytest.mark.parametrize("name", DEAR)
def test_a_planted_fault_under_a_transformation_turns_its_claim_wrong(name):
    needs = [*supported(name), "jit"]
    report = conformance(FAULTS[name], supports=needs, only=[name])
    assert report[name].verdict == "wrong", report


def test_the_tiles_of_blockwise_are_right_where_others_fail():
    report = conformance(BLOCKWISE, only=SOME)
    assert report.having("right") == report.findings, report


def test_jax_is_wrong_about_empty_rows_NaN_and_more():
    report = conformance(jax.nn.dot_product_attention, only=JAX_FAILS)
    assert [found.check for found in report.wrong] == JAX_FAILS, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        jattn.attention,
        pytest.param(BLOCKWISE, marks=pytest.mark.deep),
        jattn.dot_product_attention,
        jattn.attention_fn,
    ],
    ids=["attention", "blockwise", "dot_product_attention", "attention_fn"],
)
def test_jattn_is_right_about_everything(function):
    report = conformance(function)
    assert_right(report)
    assert len(report.having("right")) >= 55, report


@pytest.mark.slow
def test_at_least_eight_claims_are_wrong_of_each_function_of_jax_and_flax():
    modules = [pytest.importorskip(name) for name in ("flax.linen", "flax.nnx")]
    for module in (jax.nn, *modules):
        report = conformance(module.dot_product_attention)
        assert len(report.wrong) >= 8, report


def test_a_bare_function_of_three_arrays_is_enough():
    only = [
        "weights are a softmax of scores over root H",
        "a query without keys gets zero",
    ]
    report = conformance(lambda q, k, v: textbook(q, k, v), only=only)
    assert [found.verdict for found in report] == ["right", "not offered"]
    assert report[only[1]].detail == "no argument mask"


def test_a_detail_says_where_what_was_got_and_what_was_wanted():
    name = "without keys the output is zero"
    report = conformance(lambda q, k, v: 0 * q + 0.5, only=[name])
    assert report[name].detail == "out[0, 0, 0, 0] is 0.5, not 0 (240 of 240 entries)"
    report = conformance(lambda q, k, v: q[:, :, :2], only=[name])
    assert report[name].detail == "out has shape (2, 5, 2, 8), not (2, 5, 3, 8)"


def raising(error):
    def attend(q, k, v, *, mask=None, scale=None):
        raise error("never")

    return attend


@pytest.mark.parametrize(
    ("name", "error", "verdict"),
    [
        ("a mask of two axes is not guessed", ValueError, "refused"),
        ("a mask of two axes is not guessed", NotImplementedError, "refused"),
        ("a mask of two axes is not guessed", RuntimeError, "refused"),  # torch's
        ("a mask of two axes is not guessed", IndexError, "wrong"),
        ("a mask of two axes is not guessed", jax.errors.JaxRuntimeError, "wrong"),
        ("True means may look", ValueError, "wrong"),
        ("True means may look", NotImplementedError, "not offered"),
    ],
)
def test_an_error_refuses_declines_or_is_wrong(name, error, verdict):
    report = conformance(raising(error), supports=["mask"], only=[name])
    assert report[name].verdict == verdict
    assert f"{error.__name__}: never" in report[name].detail


def test_a_function_with_a_backward_pass_of_its_own_has_no_forward_mode():
    @jax.custom_vjp
    def fn(q, k, v):
        return jattn.attention(q, k, v)

    fn.defvjp(lambda *x: (fn(*x), x), lambda x, g: jax.vjp(jattn.attention, *x)[1](g))
    claims = "forward mode is the covariance", "second derivatives are right"
    report = conformance(fn, only=claims)
    assert [report[x].verdict for x in claims] == ["not offered", "not offered"]


def test_what_is_promised_may_not_be_declined():
    name = "a value has a width of its own"

    def narrow(q, k, v):
        if v.shape != k.shape:
            raise ValueError("value must be as wide as key")
        return textbook(q, k, v)

    found = conformance(narrow, only=[name])[name]
    assert found.verdict == "not offered" and "must be as wide" in found.detail
    promised = conformance(narrow, only=[name], supports=["value_dim"])
    assert promised[name].verdict == "wrong"


def test_a_feature_goes_by_every_name_it_has():
    def attend(q, k, v, *, return_residual=False):
        return textbook(q, k, v, return_lse=return_residual)

    name = "lse is the log of the denominator"
    for supports in (None, ["return_residual"], ["return_lse"]):
        assert_right(conformance(attend, only=[name], supports=supports))


def test_an_lse_with_heads_before_rows_is_read_by_its_shape():
    def attend(q, k, v, *, return_lse=False):
        out, lse = textbook(q, k, v, return_lse=True)
        return out, np.swapaxes(lse, 1, 2)

    name = "lse is the log of the denominator"
    assert_right(conformance(attend, only=[name]))


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="Did you mean 'return_lse'?"):
        conformance(textbook, supports=["return_lsé"])
    with pytest.raises(ValueError, match="Did you mean 'True means may look'?"):
        conformance(textbook, only=["true means may look"])
    with pytest.raises(TypeError, match=r"Write supports=\['mask'\]"):
        conformance(textbook, supports="mask")
    with pytest.raises(TypeError, match="Write only="):
        conformance(textbook, only="True means may look")
    with pytest.raises(ValueError, match="only must name a claim, but got none"):
        conformance(textbook, only=[])
    with pytest.raises(TypeError, match="attention_fn must be a function"):
        conformance(None)


def test_a_report_is_a_table_with_what_is_wrong_first():
    report = Conformance(
        (
            Finding("one is one", "right", "It is.", topic="values"),
            Finding("two is two", "wrong", "out is 1, not 2", topic="masks"),
            Finding("three", "not offered", "no argument mask", topic="masks"),
        ),
        "attend",
    )
    assert str(report).splitlines() == [
        "WRONG        two is two  out is 1, not 2",
        "right        one is one",
        "not offered  three       no argument mask",
        "attend: 1 wrong, 1 right, 0 refused, 1 not offered",
    ]
    assert report["three"].topic == "masks" and report.wrong == (report["two is two"],)
    assert report.first == report["two is two"] and not report.ok


def test_a_refusal_that_was_asked_for_is_right():
    name = "a negative window is refused"
    supports = ["local_window_size"]
    report = conformance(textbook, supports=supports, only=iter([name]))
    assert [found.verdict for found in report] == ["refused"] and report.ok
    report = conformance(FAULTS[name], supports=supports, only=iter([name]))
    assert report.verdict == "wrong" and not report.ok


def test_settings_of_the_process_do_not_count():
    name = "NaN in a masked value stays there"
    with jax.numpy_rank_promotion("raise"), jax.debug_nans(True), jax.enable_x64(True):
        assert_right(conformance(textbook, only=[name, "True means may look"]))


def test_calls_of_one_kind_are_compiled_once():
    traced = []

    def attend(q, k, v, *, mask=None):
        traced.append(1)
        return q

    subject = Subject(Features(attend, ["mask", "jit"]))
    x = np.ones((2, 5, 3, 8), np.float32)
    for fill in (True, False):
        subject.out(x, x, x, mask=np.full((2, 1, 5, 5), fill))
    assert len(traced) == 1
    subject.out(x, x, x)
    assert len(traced) == 2


def two_reports():
    missing = Finding("two", "not offered", "", topic="masks")
    right = Finding("one", "right", "", topic="values")
    wrong = right._replace(verdict="wrong", detail="off")
    return {
        "jattn": Conformance((right, missing), "f"),
        "jax.nn": Conformance((wrong, missing), "g"),
    }


def test_the_command_prints_a_column_for_each_function_and_totals():
    from experiments.conformance import table

    lines = table(two_reports()).splitlines()
    assert lines[0] == "| topic | claim | jattn | jax.nn |"
    assert lines[2] == "| values | one | right | **wrong** |"
    assert lines[3].startswith("|  | and 1 more, of which none is wrong;")
    assert lines[3].endswith("| 0 of 1 | 1 of 1 |")
    assert "| masks | two | - | - |" in table(two_reports(), everything=True)
    assert f"jax {jax.__version__}" in lines[-1]


def test_the_command_names_the_nearest_function(capsys):
    from experiments.__main__ import main

    assert main(["conformance", "jax.n"]) == 2
    assert "did you mean 'jax.nn'?" in capsys.readouterr().err


@pytest.mark.peer
def test_torch_behind_numpy_arrays_is_read_right():
    pytest.importorskip("torch")
    from experiments.conformance import FUNCTIONS

    names = [
        "weights are a softmax of scores over root H",
        "True means may look",
        "query head n reads key head n over G",
        "bfloat16 comes out as bfloat16",
        "a query without keys gets zero",
    ]
    report = conformance(FUNCTIONS["torch"](), only=names)
    assert report.having("right") == report.findings, str(report)
