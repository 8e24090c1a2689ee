"""Deep gradient compression beside its formula in numpy: momentum, masking, local clipping, the warm-up's fractions."""

from types import SimpleNamespace

import numpy as np
import pytest
from local_ranks import run_locally

from hpcdl.comm.compression import TrainingContext, compressed
from hpcdl.comm.compression.sparse import count_of

SIZE = 40


def states_of(spec, ranks, beta=0.9, clip_norm=0.0, per_epoch=2):
    states = [compressed(spec, SIZE, "float64") for _ in range(ranks)]
    for state in states:
        rule = SimpleNamespace(beta=beta, clip_norm=clip_norm, step=0)
        state.training = TrainingContext(rule, np.zeros(SIZE), steps=99, per_epoch=per_epoch)
    return states


def follow(states, steps, scale=0.25, seed=1):
    """Reduce gradients of so many steps; yields the gradients of all ranks, and what each rank got."""
    random = np.random.default_rng(seed)
    for step in range(steps):
        for state in states:
            state.training.optimizer.step, state.training.scale = step, scale
        gradients = random.standard_normal((len(states), SIZE))
        rows = gradients.copy()
        run_locally(lambda comm, vector: states[comm.rank].steps(comm, vector), list(rows))
        yield gradients, rows


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_papers_steps(ranks, clip_norm):
    u, v = np.zeros((2, ranks, SIZE))
    for gradients, rows in follow(states_of("dgc:0.1,warmup=0", ranks, clip_norm=clip_norm), 6):
        total = np.zeros(SIZE)
        for r in range(ranks):
            g = 0.25 * gradients[r]
            if clip_norm:
                g *= min(1, clip_norm / np.sqrt(ranks) / np.linalg.norm(g))
            u[r] = 0.9 * u[r] + g
            v[r] += u[r]
            sent = np.argsort(-np.abs(v[r]), kind="stable")[:4]
            total[sent] += v[r, sent]
            u[r, sent] = v[r, sent] = 0
        assert all(row.tobytes() == rows[0].tobytes() for row in rows)
        np.testing.assert_allclose(rows[0], total, rtol=0, atol=1e-12)


def test_the_warmup_sends_less_from_epoch_to_epoch():
    states, found = states_of("dgc:0.05", 2), []
    for _, rows in follow(states, 12):
        assert np.count_nonzero(rows[0]) <= 2 * states[0].message.size // 12
        found.append(states[0].message.size // 12)  # an index and a value
    assert found == [count_of(f, SIZE) for f in (0.25, 0.25, 0.0625, 0.0625) + (0.05,) * 8]
