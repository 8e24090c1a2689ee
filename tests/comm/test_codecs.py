"""Codecs of compressed messages: lengths, exact and unbiased ones, error feedback, what a spec may say."""

import numpy as np
import pytest

from hpcdl.comm.compression import RandomKey, feedback_for, make_codec, methods, parse
from hpcdl.errors import UsageError

SPECS = ["float16", "bfloat16", "int8", "qsgd:bits=1", "qsgd:bits=2", "qsgd", "qsgd:bits=8,block=64", "terngrad"]
SPECS += ["terngrad:clip=2.5", "sign", "topk:0.1", "randomk:0.1", "randomk:0.1,feedback=no"]
LENGTHS = [0, 1, 2, 7, 511, 512, 513, 3001]
KEY = RandomKey(seed=3, step=5)


def draw(n, dtype="float64", seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def through(codec, values, key=KEY):
    """Return the values that a receiver gets."""
    message, out = codec.message(values.size), np.full_like(values, 7)
    codec.encode(values, message, key)
    codec.decode(message, out)
    return out


def test_no_method_is_left_out():
    assert {spec.partition(":")[0] for spec in SPECS} == {
        name for name, each in methods().items() if each.codec and not each.optimizers
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_message_is_decoded_alike_and_added_with_a_factor(spec, dtype):
    codec = make_codec(spec, dtype)
    for n in LENGTHS:
        values = draw(n, dtype)
        before, message = values.copy(), codec.message(n)
        assert message.size == codec.message_bytes(n)
        codec.encode(values, message, KEY)
        assert np.array_equal(values, before)
        sum_of_two = np.zeros(n, dtype)
        codec.add(message, sum_of_two, 2.0)
        codec.add(message, sum_of_two, -1.0)
        np.testing.assert_allclose(sum_of_two, through(codec, values), rtol=1e-5, atol=0)
        assert not through(codec, np.zeros(n, dtype)).any()


@pytest.mark.parametrize(
    "spec, n, expected",
    [
        ("bfloat16", 1000, 2000),
        ("int8", 1000, 1000 + 8),
        ("qsgd:bits=1", 1001, 126 + 8),
        ("qsgd:bits=2", 1001, 251 + 8),
        ("qsgd", 1001, 501 + 8),
        ("qsgd:bits=8,block=1024", 1001, 1001 + 4),
        ("terngrad", 1001, 251 + 4),
        ("sign", 1001, 126 + 8),
        ("topk:0.01", 1000, 10 * 8),
        ("topk:0.01", 3, 8),
        ("randomk:0.01", 1000, 8 + 10 * 4),
    ],
)
def test_bytes(spec, n, expected):
    assert make_codec(spec, "float32").message_bytes(n) == expected


@pytest.mark.parametrize("spec", ["topk:1", "randomk:1", "randomk:1,feedback=no"])
def test_everything_is_the_vector(spec):
    for n in LENGTHS:
        assert np.array_equal(through(make_codec(spec, "float64"), draw(n)), draw(n))


def test_the_largest_are_sent_and_ties_go_to_the_lower_index():
    values = np.array([3.0, -1.0, 2.0, -3.0, 0.0, 2.0, 2.0, 1.0])
    assert through(make_codec("topk:0.5", "float64"), values).tolist() == [3, 0, 2, -3, 0, 2, 0, 0]


def test_nearest_rounding_errs_by_half_a_step_and_ends_are_exact():
    values = draw(3001)
    error = np.abs(through(make_codec("int8", "float64"), values) - values)
    for start in range(0, 3001, 512):
        top = np.abs(values[start : start + 512]).max()
        assert error[start : start + 512].max() <= top / 254 * (1 + 1e-6)
        assert error[start + np.abs(values[start : start + 512]).argmax()] <= 1e-7 * top


def test_signs_are_the_formula_of_the_paper():
    values, got = draw(1200), through(make_codec("sign", "float64"), draw(1200))
    for start in (0, 512, 1024):
        part = values[start : start + 512]
        np.testing.assert_allclose(got[start : start + 512], np.sign(part) * np.abs(part).mean(), rtol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
    "spec", ["qsgd:bits=1", "qsgd:bits=2", "qsgd", "qsgd:bits=8", "terngrad", "randomk:0.2,feedback=no"]
)
def test_unbiased(spec):
    codec, values, count = make_codec(spec, "float64"), draw(40), 10_000
    drawn = np.array([through(codec, values, RandomKey(1, step)) for step in range(count)])
    deviation = drawn.std(axis=0) / np.sqrt(count)
    assert (np.abs(drawn.mean(axis=0) - values) <= 5 * deviation + 1e-6).all()
    assert drawn.std(axis=0).max() > 0


@pytest.mark.parametrize("spec", ["qsgd:block=8", "terngrad"])
def test_random_numbers_depend_on_the_index_in_the_whole_vector(spec):
    values, codec = draw(1000), make_codec(spec, "float64")
    values[::10] = 4.0  # one scale for all, so that a part is rounded as within the whole
    whole = through(codec, values)
    for cut in (slice(0, 240), slice(240, 1000)):
        assert np.array_equal(through(codec, values[cut], KEY.at(cut.start)), whole[cut])
        assert not np.array_equal(through(codec, values[cut], KEY.at(cut.start + 1)), whole[cut])
    assert not np.array_equal(through(codec, values, KEY._replace(step=6)), whole)
    assert not np.array_equal(through(codec, values, KEY._replace(use="sum")), whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "spec", [f"{spec}{',' if ':' in spec else ':'}feedback=yes" for spec in SPECS if "=no" not in spec]
)
def test_what_is_sent_plus_what_is_kept_is_what_there_was(spec, dtype):
    """To the bit for values sent as they are, to one rounding for others."""
    feedback = feedback_for(spec, 777, dtype)
    message, out = feedback.codec.message(777), np.empty(777, dtype)
    for step in range(5):
        values = draw(777, dtype, seed=step)
        there = values + feedback.residual
        feedback.encode(values, message, RandomKey(0, step))
        feedback.codec.decode(message, out)
        if spec.startswith(("topk", "randomk")):
            assert np.array_equal(out + feedback.residual, there)
        else:
            exact = out.astype("f8") + feedback.residual
            np.testing.assert_allclose(exact, there, rtol=0, atol=2 * np.finfo(dtype).eps * np.abs(there).max() * 8)
    assert feedback.residual.any()


def test_signs_with_feedback_are_the_formula_in_numpy():
    feedback = feedback_for("sign:block=8", 8, "float64")
    residual, out, message = np.zeros(8), np.empty(8), feedback.codec.message(8)
    for step in range(20):
        v = draw(8, seed=step) + residual
        expected = np.where(v >= 0, 1, -1) * np.float64(np.float32(np.abs(v).mean()))
        residual = v - expected
        feedback.encode(draw(8, seed=step), message, KEY)
        feedback.codec.decode(message, out)
        np.testing.assert_allclose(out, expected, rtol=1e-12)
        np.testing.assert_allclose(feedback.residual, residual, atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("randomk")])
def test_what_is_not_finite_is_not_hidden(spec, bad):
    values = draw(600)
    values[550] = bad
    assert not np.isfinite(through(make_codec(spec, "float64"), values)).all()


@pytest.mark.parametrize(
    "spec, words",
    [
        ("topk:0", "compression 'topk:0': fraction is above 0 and at most 1, not 0"),
        ("topk:2", "fraction is above 0 and at most 1, not 2"),
        ("topk:nan", "fraction is above 0 and at most 1, not nan"),
        ("randomk:x", "fraction should be of type float, not 'x'"),
        ("qsgd:bits=3", "bits is 1, 2, 4 or 8, not 3"),
        ("qsgd:levels=3", "has no setting 'levels'"),
        ("qsgd:block=12", "block is a power of two from 8 on, not 12"),
        ("sign:veto", "has no setting 'veto'"),
        ("sign:vote=maybe", "vote is yes or no, not 'maybe'"),
        ("int8:feedback=1", "feedback is yes or no, not '1'"),
        ("terngrad:clip=-1", "clip is 0 .none. or a number"),
        ("gzip", "unknown compression 'gzip'"),
    ],
)
def test_bad_specs(spec, words):
    with pytest.raises(UsageError, match=words):
        parse(spec)


def test_feedback_is_a_setting_of_every_method():
    for name in methods():
        assert parse(f"{name}:feedback=yes")[1] and not parse(f"{name}:feedback=no")[1]
    assert not parse("sign:vote")[1] and parse("sign")[1] and parse("sign:vote,feedback=yes")[1]
    assert parse("topk:0.5,feedback=no")[1:] == (False, {"fraction": 0.5})


def test_a_corrupt_index_writes_nowhere():
    codec, memory = make_codec("topk:0.5", "float32"), np.zeros(9, np.float32)
    message = codec.message(8)
    codec.encode(np.arange(1, 9, dtype=np.float32), message, KEY)
    codec.parts(message)[1][0] = 8
    codec.decode(message, memory[:8])
    assert memory.tolist() == [0, 0, 0, 0, 0, 6, 7, 8, 0]
