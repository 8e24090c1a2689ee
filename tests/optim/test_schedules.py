"""Learning-rate schedules by their values at named steps; 10 epochs of 20 steps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.errors import UsageError
from hpcdl.optim import make_schedule

LR, STEPS, EPOCH, BATCH = 0.4, 200, 20, 64


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("constant", {0: 0.4, 1: 0.4, 199: 0.4, 1000: 0.4}),
        ("step", {0: 0.4, 199: 0.4, 200: 0.04, 399: 0.04, 400: 0.004}),
        ("step:every=2,factor=0.5", {0: 0.4, 39: 0.4, 40: 0.2, 79: 0.2, 80: 0.1, 199: 0.4 / 16}),
        ("step:every=0.5,factor=0.5", {9: 0.4, 10: 0.2, 20: 0.1}),
        ("cosine", {0: 0.4, 50: 0.2 + 0.2 * math.sqrt(0.5), 100: 0.2, 200: 0.0, 500: 0.0}),
        ("cosine:cycles=4", {0: 0.4, 25: 0.2, 49: 0.2 + 0.2 * math.cos(math.pi * 0.98), 50: 0.4, 150: 0.4, 175: 0.2}),
        ("cosine:cycles=3", {0: 0.4, 66: 0.2 + 0.2 * math.cos(math.pi * 66 / 67), 67: 0.4, 134: 0.4}),
        ("cosine:floor=0.1", {0: 0.4, 100: 0.22, 200: 0.04, 500: 0.04}),
        ("1/t", {0: 0.4, 1: 0.4 / 1.01, 100: 0.2, 300: 0.1}),
        ("1/t:decay=1", {0: 0.4, 1: 0.2, 3: 0.1}),
        ("1/t:decay=0", {0: 0.4, 300: 0.4}),
        ("polynomial", {0: 0.4, 1: 0.4 / 2**0.55, 99: 0.4 / 100**0.55}),
        ("polynomial:b=16,gamma=0.5", {0: 0.1, 9: 0.08, 84: 0.04}),
        # two epochs of warm-up: 40 steps, from 1/40 of the rate to all of it
        ("constant:warmup=2", {0: 0.01, 1: 0.02, 19: 0.2, 39: 0.4, 40: 0.4, 199: 0.4}),
        ("constant:warmup=0.05", {0: 0.4, 1: 0.4}),
        ("step:every=3,factor=0.5,warmup=2", {0: 0.01, 39: 0.4, 40: 0.4, 59: 0.4, 60: 0.2}),
        ("cosine:warmup=2", {0: 0.01, 39: 0.4, 40: 0.4, 120: 0.2, 200: 0.0}),
        ("polynomial:b=4,gamma=0.5,warmup=2", {0: 0.01, 39: 0.4, 40: 0.2, 45: 0.4 / 3}),
        ("1/t:decay=1,warmup=2", {0: 0.01, 39: 0.4, 40: 0.4, 41: 0.2}),
        # the rate is meant for batches of 16, and these have 64
        ("constant:reference-batch=16", {0: 1.6, 199: 1.6}),
        ("constant:reference-batch=128", {0: 0.2}),
        ("constant:reference-batch=16,warmup=2", {0: 0.04, 39: 1.6}),
        ("cosine:floor=0.1,reference-batch=16", {0: 1.6, 200: 0.16}),
    ],
)
def test_values(spec, values):
    rate = make_schedule(spec, LR, STEPS, EPOCH, BATCH)
    assert {step: rate(step) for step in values} == pytest.approx(values, rel=1e-12, abs=1e-15)


@settings(max_examples=100, deadline=None)
@given(
    spec=st.sampled_from(["constant", "step:every=1", "cosine:floor=0.2", "1/t:decay=0.5", "polynomial:b=2"]),
    warmup=st.floats(0, 30),
    lr=st.floats(1e-6, 10),
    steps=st.integers(0, 100),
    epoch=st.integers(1, 9),
)
def test_rises_during_warm_up_and_never_afterwards(spec, warmup, lr, steps, epoch):
    ramp = round(warmup * epoch)
    rate = make_schedule(f"{spec},warmup={warmup}" if ":" in spec else f"{spec}:warmup={warmup}", lr, steps, epoch, 8)
    rates = [rate(step) for step in range(ramp + 120)]
    assert rates[:ramp] == pytest.approx([lr * (step + 1) / ramp for step in range(ramp)], rel=1e-12)
    assert all(a >= b >= 0 for a, b in zip(rates[ramp:], rates[ramp + 1 :], strict=False))
    assert max(rates) <= lr * (1 + 1e-12)


@pytest.mark.parametrize(
    ("spec", "lr", "message"),
    [
        ("cosin", LR, r"unknown schedule 'cosin' \(did you mean 'cosine'\?\); known: 1/t, constant, cosine, poly"),
        ("constant:floor=1", LR, "'constant' has no setting 'floor'"),
        ("step:every=often", LR, "every should be of type float"),
        ("step:every=0", LR, "every is positive, not 0.0"),
        ("step:factor=0", LR, "factor is positive, not 0.0"),
        ("step:factor=-1", LR, "factor is positive, not -1.0"),
        ("cosine:floor=-0.1", LR, "floor is zero or positive, at most 1.0, not -0.1"),
        ("cosine:cycles=0", LR, "cycles is positive, not 0"),
        ("cosine:cycles=1.5", LR, "cycles should be of type int, not '1.5'"),
        ("cosine:floor=1.1", LR, "floor is zero or positive, at most 1.0, not 1.1"),
        ("polynomial:b=0", LR, "b is positive, not 0.0"),
        ("1/t:decay=-1", LR, "decay is zero or positive, not -1.0"),
        ("constant:warmup=-1", LR, "warmup is zero or positive, not -1.0"),
        ("constant:warmup=inf", LR, "warmup is zero or positive, not inf"),
        ("constant:reference-batch=-8", LR, "reference-batch is zero or positive, not -8"),
        ("constant:reference-batch=1.5", LR, "reference-batch should be of type int"),
        ("constant", 0.0, "learning rate is positive, not 0.0"),
        ("constant", -0.1, "learning rate is positive, not -0.1"),
        ("constant", float("nan"), "learning rate is positive, not nan"),
        ("constant", float("inf"), "learning rate is positive, not inf"),
    ],
)
def test_wrong_settings(spec, lr, message):
    with pytest.raises(UsageError, match=message):
        make_schedule(spec, lr, STEPS, EPOCH, BATCH)


@pytest.mark.parametrize(
    "spec", ["step:factor=1e308,every=1e-9", "step:every=1e308", "cosine:warmup=1e308", "1/t:decay=1e308"]
)
def test_settings_beyond_all_steps_give_a_rate_at_each(spec):
    """The rate may be infinite; a run with such a rate reports it."""
    rate = make_schedule(spec, LR, STEPS, EPOCH, BATCH)
    assert all(rate(step) >= 0 for step in range(0, STEPS, 7))
