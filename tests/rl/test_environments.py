"""Environments: those of gymnasium stepped by hand, one's own with every fault, seeds, restarts, what they show."""

import subprocess
import sys

import numpy as np
import pytest
import walks
from own_time import set_own_time

from hpcdl.errors import TrainingError, UsageError
from hpcdl.random import Random
from hpcdl.rl import environment_factory
from hpcdl.rl import environments as environments_module
from hpcdl.rl.environments import Environments
from hpcdl.rl.replay import Replay


@pytest.fixture(autouse=True)
def none_made(monkeypatch):
    monkeypatch.setattr(walks.Walk, "made", 0)


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


def seed_of(seed, number, episode):
    return int(Random(seed)("environment", number, episode).integers(2**31))


def test_is_gymnasium_stepped_by_hand(gymnasium):
    """Observations, rewards, ends, the true last observation, the next episode at once, what has finished."""
    environments = Environments("CartPole-v1", {"max_episode_steps": 20}, 3, seed=4)
    assert (environments.shape, environments.dtype, environments.actions) == ((4,), np.float32, 2)
    by_hand = [gymnasium.make("CartPole-v1", max_episode_steps=20) for _ in range(3)]
    episodes, totals, finished = [0] * 3, [0.0] * 3, []
    observations = environments.reset()
    now = np.stack([each.reset(seed=seed_of(4, i, 0))[0] for i, each in enumerate(by_hand)])
    cuts = 0
    for turn in range(150):
        np.testing.assert_array_equal(observations, now)
        actions = Random(1)("act", turn).integers(0, 2, 3)
        actions[0] = turn % 2  # holds itself up until it is cut
        stepped = environments.step(actions)
        for i, each in enumerate(by_hand):
            now[i], reward, terminated, truncated, _ = each.step(int(actions[i]))
            totals[i] += reward
            assert (stepped.rewards[i], stepped.terminated[i], stepped.truncated[i]) == (reward, terminated, truncated)
            if terminated or truncated:
                np.testing.assert_array_equal(stepped.final[i], now[i])
                finished.append((totals[i], int(totals[i])))
                totals[i], episodes[i], cuts = 0.0, episodes[i] + 1, cuts + truncated
                now[i] = each.reset(seed=seed_of(4, i, episodes[i]))[0]
        observations = stepped.observations
    assert environments.finished == finished and len(finished) > 10 and cuts > 0
    assert environments.episodes.tolist() == episodes and environments.restarts == 0
    environments.close()


@pytest.mark.parametrize("spec", ["walks:Walk,length=4", "CartPole-v1"])
def test_seeds_do_not_depend_on_the_actors(spec):
    """Five environments of one actor, of two, of three."""
    if spec == "CartPole-v1":
        pytest.importorskip("gymnasium")

    def played(parts):
        actors = [Environments(spec, {}, count, 7, first) for first, count in parts]
        shown = [np.concatenate([each.reset() for each in actors])]
        for turn in range(30):
            actions = np.array([(turn + number) % 2 for number in range(5)])
            steps = [one.step(actions[first : first + n]) for one, (first, n) in zip(actors, parts, strict=True)]
            shown.append(np.concatenate([each.observations for each in steps]))
        return np.stack(shown)

    alone = played([(0, 5)])
    for parts in ([(0, 2), (2, 3)], [(0, 1), (1, 3), (4, 1)]):
        np.testing.assert_array_equal(played(parts), alone)
    assert len(np.unique(alone[0, :, 0])) == 5  # each is another
    assert (Environments(spec, {}, 5, 8).reset() != alone[0]).any()


@pytest.mark.parametrize("fault", ["step", "exit"])
def test_one_that_raises_is_made_anew(fault):
    environments = Environments("walks:once", {"faults": fault}, 2, 0)
    environments.copies[1].faults = ""
    made_before = walks.Walk.made
    environments.reset()
    for step in range(1, 10):  # it breaks three times, but not in a row
        before, old = environments.current.copy(), list(environments.copies)
        stepped = environments.step(np.array([2, 1]))
        broke = step % 3 == 0
        assert stepped.truncated.tolist() == [broke, False]
        assert stepped.terminated.tolist() == [False, step == 5]
        assert stepped.rewards.tolist() == [0.0 if broke else 2.0, 1.0]
        assert (environments.copies[0] is not old[0]) == broke and environments.copies[1] is old[1]
        if broke:
            np.testing.assert_array_equal(stepped.final[0], before[0])
            random = np.random.default_rng(seed_of(0, 0, step // 3))
            np.testing.assert_array_equal(stepped.observations[0], np.float32([random.random(), 0]))
    assert environments.restarts == 3 and walks.Walk.made == made_before + 3
    assert environments.finished == [(4.0, 2), (5.0, 5), (4.0, 2), (4.0, 2)]  # up to where they were cut


@pytest.mark.parametrize(
    ("fault", "steps", "words"),
    [
        ("always", 3, "environment 4, episode 2, step 0, has raised three times in a row: RuntimeError: it broke "),
        ("make", 3, "environment 4, episode 0, step 2, has raised three times in a row: UsageError: .* no more of"),
        ("later", 5, "environment 4, episode 3, step 0, has raised three times in a row: ValueError: cannot begin "),
    ],
)
def test_three_times_in_a_row(fault, steps, words):
    environments = Environments("walks:once", {"faults": fault}, 1, 0, first=4)
    environments.reset()
    for _ in range(steps - 1):
        environments.step(np.zeros(1, int))
    if fault == "later":
        environments.make = lambda: walks.Walk(faults="reset")
        environments.copies[0].faults = "reset"
    with pytest.raises(TrainingError, match=words) as raised:
        environments.step(np.zeros(1, int))
    assert "\n" not in str(raised.value) and "walks.py, line " in str(raised.value)
    assert environments.restarts == 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [("reward", "returned the reward nan"), ("shown", "shows NaN or infinity"), ("shape", "shows float32 of shape")],
)
def test_what_is_no_number_ends_the_run(fault, words):
    environments = Environments("walks:once", {"faults": fault}, 1, 0, first=2)
    environments.reset()
    for _ in range(2):
        environments.step(np.zeros(1, int))
    with pytest.raises(TrainingError, match=f"--env walks:once: environment 2, episode 0, step [23], {words}"):
        environments.step(np.zeros(1, int))


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("walks:once", {"faults": "first"}, "environment 0, episode 0, step 0, shows NaN or infinity"),
        ("walks:once", {"faults": "reset"}, r"ValueError: cannot begin \(walks.py, line \d+\)"),
        ("walks:once", {"breadth": 3}, "unexpected keyword argument 'breadth'"),
        ("walks:Walk,breadth=3", {}, "there is no setting 'breadth'; it takes length, faults"),
        ("walks:nothing", {}, "the environment is a int, which has no reset"),
        ("walks:no_pair", {}, r"reset should return \(observation, info\), not ndarray"),
        ("walks:no_seed", {}, "unexpected keyword argument 'seed'"),
        ("walks:nobody", {}, "has no attribute 'nobody'"),
        ("wolks:once", {}, "No module named 'wolks'"),
        ("walks:Spaced,n=None", {}, "the action space is .* not continuous"),
        ("walks:Spaced", {"n": 4, "shape": (4,)}, "the action space is .* not continuous or several"),
        ("walks:Spaced,n=0", {}, "the action space is"),
        ("walks:Walk", {"length": 3, "render_mode": 3, "count": 0}, "there is no setting 'count'"),
        ("Pendulum-v1", {}, "the action space is Box.*, not continuous"),
        ("CartPol-v1", {}, "Did you mean: `CartPole`"),
        ("CartPole-v9", {}, "version"),
        ("CartPole-v1", {"color": "red"}, "unexpected keyword argument 'color'"),
        ("nowhere:Walk-v0", {}, "No module named 'nowhere'"),
        ("", {}, "Malformed"),
    ],
)
def test_bad_ones_of_ones_own_and_of_gymnasium(spec, options, words):
    if not spec.startswith(("walks:", "wolks:")):
        pytest.importorskip("gymnasium")
    with pytest.raises(UsageError, match=words) as raised:
        Environments(spec, options, 1, 0)
    assert str(raised.value).startswith(f"--env {spec}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("package", "spec", "words"),
    [
        ("gymnasium", "CartPole-v1", r"needs gymnasium, .*: pip install 'hpcdl\[rl\]'"),
        ("minatar.gym", "minatar:breakout", "needs minatar, .*: pip install minatar"),
        ("ale_py", "ALE/Pong-v5", "needs ale_py, .*: pip install ale-py"),
    ],
)
def test_packages_that_are_missing(package, spec, words, monkeypatch):
    if package != "gymnasium":
        pytest.importorskip("gymnasium")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"--env {spec} {words}"):
        Environments(spec, {}, 1, 0)


def test_gymnasium_is_imported_only_where_it_is_asked_for(alone):
    code = "import sys, hpcdl.rl.environments, hpcdl.rl.chunk; sys.exit('gymnasium' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        *((kind, (3, 4, 5), np.uint8) for kind in ("image", "first", "truth")),
        *(("grey", (1, 4, 5), np.uint8), ("bytes", (7,), np.uint8)),
        ("float", (6,), np.float32),
        ("number", (1,), np.float32),
    ],
)
def test_what_is_shown(kind, shape, dtype):
    environments = Environments("walks:Shows", {"kind": kind}, 2, 0)
    assert (environments.shape, environments.dtype, environments.actions) == (shape, dtype, 2)
    assert environments.reset().shape == (2, *shape)
    stepped = environments.step(np.array([0, 1]))  # their numbers begin at 5
    assert stepped.truncated.tolist() == [False, True] and stepped.final.shape == (2, *shape)
    plain = walks.Shows(kind)
    for array, action in ((stepped.observations[0], 5), (stepped.final[1], 6), (stepped.observations[1], 0)):
        shown = np.asarray(plain.shown(action))
        if kind == "truth":
            shown = shown * np.uint8(255)
        shown = shown.transpose(2, 0, 1) if kind in ("image", "truth") else shown
        np.testing.assert_array_equal(array.reshape(-1), shown.reshape(-1))


@pytest.mark.parametrize(("spec", "size"), [("FrozenLake-v1", 16), ("Blackjack-v1", 45)])
def test_numbers_and_tuples_are_flattened(spec, size, gymnasium):
    environments = Environments(spec, {}, 2, 0)
    assert (environments.shape, environments.dtype) == ((size,), np.float32)
    shown = environments.reset()
    assert (shown.sum(axis=1) == (1 if spec == "FrozenLake-v1" else 3)).all() and set(np.unique(shown)) == {0, 1}


def test_an_environment_that_costs_time(monkeypatch):
    slept = []
    set_own_time(monkeypatch, environments_module, sleep=slept.append)
    environments = Environments("walks:Walk", {}, 3, 0, pretend=5.0)
    environments.reset()
    environments.step(np.zeros(3, int))
    assert slept == [pytest.approx(0.015)]


def test_goes_on_with_the_episodes_that_come_next():
    one = Environments("walks:Walk", {"length": 3}, 2, 0)
    one.reset()
    for _ in range(7):
        one.step(np.zeros(2, int))
    assert one.episodes.tolist() == [2, 2]
    state = one.state()
    other = Environments("walks:Walk", {"length": 3}, 2, 0)
    other.load(state)
    begun = other.reset()
    assert other.episodes.tolist() == [3, 3]
    np.testing.assert_array_equal(begun, one.reset())
    for wrong in ({}, {"episodes": np.zeros(3)}):
        with pytest.raises(UsageError, match="is not of 2 environments"):
            other.load(wrong)


def test_pictures():
    picture = Environments("walks:Shows", {"kind": "image"}, 1, 0, render=True).picture()
    assert picture.shape == (2, 2, 3) and picture.dtype == np.uint8
    for spec, options in (("walks:Shows", {"kind": "grey"}), ("walks:Walk", {})):
        with pytest.raises(UsageError, match=f"--env {spec} cannot be shown"):
            Environments(spec, options, 1, 0, render=True).picture()


def test_minatar():
    pytest.importorskip("gymnasium")
    pytest.importorskip("minatar")
    environments = Environments("minatar:space_invaders", {}, 2, 0, render=True)
    assert environments.option == "--env minatar:space_invaders" and environments.actions == 4
    assert (environments.shape, environments.dtype, environments.stack) == ((6, 10, 10), np.uint8, 1)
    assert set(np.unique(environments.reset())) == {0, 255}
    again = Environments("MinAtar/SpaceInvaders-v1", {}, 1, 0, first=1)
    again.reset()
    for turn in range(300):
        stepped, same = environments.step(np.full(2, turn % 4)), again.step(np.full(1, turn % 4))
        np.testing.assert_array_equal(stepped.observations[1], same.observations[0])
    assert environments.finished and environments.picture().shape == (10, 10, 3)


def test_atari():
    """Stacks of four frames, of which a replay memory stores one; signs of rewards; true returns."""
    for package in ("gymnasium", "ale_py", "cv2"):
        pytest.importorskip(package)
    environments = Environments("ALE/Skiing-v5", {"noop_max": 3, "max_episode_steps": 12}, 2, 0)
    assert (environments.shape, environments.dtype, environments.stack) == ((4, 84, 84), np.uint8, 4)
    replay = Replay(100, environments.shape, environments.dtype, streams=2, stack=4, n_step=2)
    seen, observations = [], environments.reset()
    assert (observations == observations[:, :1]).all()  # the first frame, four times
    for turn in range(30):
        actions = np.array([turn % 3, 1])
        stepped = environments.step(actions)
        assert set(np.unique(stepped.rewards)) <= {-1.0, 0.0, 1.0}
        seen += list(observations)
        replay.add(observations, actions, *stepped[1:])
        observations = stepped.observations
    assert [each.length for each in environments.finished] == [12] * 4
    assert min(each.returned for each in environments.finished) < -12
    assert replay.frames.nbytes == 100 * 84 * 84
    found = replay.gather(np.flatnonzero(replay.steps["ahead"] >= 0))
    assert len(found.index) == 2 * (30 - 2)
    known = {each.tobytes() for each in seen}
    assert all(each.tobytes() in known for each in found.observations)


@pytest.mark.parametrize("options", [{"screen_size": -3}, {"frame_skip": 0}, {"mode": 99}])
def test_bad_options_of_atari(options):
    for package in ("gymnasium", "ale_py", "cv2"):
        pytest.importorskip(package)
    with pytest.raises(UsageError, match="--env ALE/Pong-v5: "):
        Environments("ALE/Pong-v5", options, 1, 0)


def test_every_wrapper_has_its_option():
    import inspect

    wrappers = pytest.importorskip("gymnasium.wrappers")
    assert set(environment_factory.WRAPPERS) <= set(inspect.signature(wrappers.AtariPreprocessing).parameters)
