"""From --env to a function that makes an environment; what it shows, as an array; which actions it has.

    CartPole-v1                gymnasium's registry; a package's own as package:Name-v0, which imports it
    minatar:breakout           MinAtar (MinAtar/Breakout-v1), where it is installed
    ALE/Breakout-v5            Atari, where ale-py and OpenCV are installed, with the usual wrappers: up to 30 idle
                               steps at the beginning, an action for 4 frames, the larger of the last two, grey, 84 by
                               84, the last 4 of these; the agent learns from the signs of rewards
    package.module:function    one's own: what it returns has reset, step and action_space as gymnasium's environments

Options go to what makes it, but for those of the wrappers: noop_max, frame_skip, screen_size, terminal_on_life_loss,
stack, clip.

    observation                                 array
    a number out of several, dict, tuple        float32 (size,), as gymnasium flattens its space
    bytes (height, width, channels)             uint8 (channels, height, width); the first axis may be the channels,
                                                where it is shorter than the last
    truth values of that shape                  the same, 0 or 255
    one byte each                               uint8 (size,)
    all else                                    float32 (size,)

(Wrappers: Mnih et al., Nature 2015; Machado et al., "Revisiting the Arcade Learning Environment", JAIR 2018)
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError, blamed_on
from hpcdl.plugins import blamed_on_own, is_own, made, own

MINATAR, ATARI = "minatar:", "ALE/"
WRAPPERS = {"noop_max": 30, "frame_skip": 4, "screen_size": 84, "terminal_on_life_loss": False}
AFTERWARDS = {"stack": 4, "clip": True}


class Maker(NamedTuple):
    """make() makes an environment; stack: how many frames make an observation; clip: signs of rewards are learnt."""

    make: Callable[[], Any]
    stack: int = 1
    clip: bool = False


def maker(spec: str, options: dict[str, Any], render: bool = False) -> Maker:
    """What makes the environments of this name. Raises UsageError, one line, where nothing can.

    render: they can be seen.
    """
    told = f"--env {spec}"
    if spec.lower().startswith(MINATAR):
        name = spec[len(MINATAR) :].replace("_", " ").title().replace(" ", "")
        spec = f"MinAtar/{name}-v1"
    elif is_own(spec):
        return own_maker(spec, options, told, render)
    gymnasium = imported("gymnasium", told, "pip install 'hpcdl[rl]'")
    if spec.startswith("MinAtar/"):
        minatar = imported("minatar.gym", told, "pip install minatar")
        if not any(name.startswith("MinAtar/") for name in gymnasium.registry):
            minatar.register_envs()
    how: dict[str, Any] = {"disable_env_checker": True, "render_mode": "rgb_array" if render else None}
    if not spec.startswith(ATARI):
        return Maker(lambda: made_by(gymnasium, spec, how | options, told))
    ale = imported("ale_py", told, "pip install ale-py")
    imported("cv2", told, "pip install opencv-python-headless")
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)
    gymnasium.register_envs(ale)
    wrapped = {name: options.get(name, value) for name, value in (WRAPPERS | AFTERWARDS).items()}
    inner = how | {"frameskip": 1} | {name: value for name, value in options.items() if name not in wrapped}
    stack, clip, most = int(wrapped.pop("stack")), bool(wrapped.pop("clip")), inner.pop("max_episode_steps", 0)

    def make() -> Any:
        environment = made_by(gymnasium, spec, inner, told)
        with blamed_on(told):
            environment = gymnasium.wrappers.AtariPreprocessing(environment, **wrapped)
            if most:  # the agent's steps, not the game's frames
                environment = gymnasium.wrappers.TimeLimit(environment, most)
            return gymnasium.wrappers.FrameStackObservation(environment, stack) if stack > 1 else environment

    return Maker(make, stack, clip)


def own_maker(spec: str, options: dict[str, Any], told: str, render: bool) -> Maker:
    """The same for package.module:function."""
    function, settings = own(spec, told)
    offered = {"render_mode": "rgb_array" if render else None}

    def make() -> Any:
        found = made(function, settings | options, offered, told)
        if missing := [name for name in ("reset", "step", "action_space") if not hasattr(found, name)]:
            raise UsageError(
                f"{told}: it makes a {type(found).__name__}, which has no {missing[0]}; an environment has reset, "
                "step and action_space, as gymnasium's have them"
            )
        return found

    return Maker(make)


def made_by(gymnasium: Any, spec: str, how: dict[str, Any], told: str) -> Any:
    """gymnasium.make, whose errors are one line."""
    with blamed_on(told):
        return gymnasium.make(spec, **how)


def imported(name: str, told: str, install: str) -> Any:
    """The module of that name; UsageError where it is not installed."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{told} needs {package}, which cannot be imported ({error}): {install}") from None


def actions_of(environment: Any, told: str) -> tuple[int, int]:
    """(how many actions there are, the number of the first). Raises UsageError where they are no such numbers."""
    space = environment.action_space
    count = getattr(space, "n", None)
    if not isinstance(count, int | np.integer) or tuple(getattr(space, "shape", ()) or ()) != () or count < 1:
        raise UsageError(
            f"{told}: its actions are {space}; a Q-network chooses one of a number of actions (Discrete), "
            "not continuous or several ones"
        )
    return int(count), int(getattr(space, "start", 0))


def viewer(environment: Any, told: str) -> Callable[[Any], np.ndarray]:
    """The function that makes an array of what this environment shows, as the table above has it."""
    space = getattr(environment, "observation_space", None)
    if space is None or type(space).__name__ == "Box" or not type(space).__module__.startswith("gymnasium."):
        return array_of
    flatten = imported("gymnasium.spaces.utils", told, "pip install 'hpcdl[rl]'").flatten
    return lambda observation: np.asarray(flatten(space, observation), np.float32).reshape(-1)


def array_of(observation: Any) -> np.ndarray:
    """An observation that is an array, or can be made one."""
    found = np.asarray(observation)
    if found.dtype == bool and found.ndim > 1:
        found = found.astype(np.uint8) * np.uint8(255)
    if found.dtype != np.uint8:
        return np.asarray(found, np.float32).reshape(-1)
    if found.ndim == 2:
        return found[None]
    if found.ndim == 3:
        return found if found.shape[0] < found.shape[2] else found.transpose(2, 0, 1)
    return found.reshape(-1)


def first_of(environment: Any, seed: int, told: str) -> Any:
    """What the environment shows first; UsageError where it cannot be told a seed, or does not return a pair."""
    with blamed_on_own(told):
        begun = environment.reset(seed=seed)
    if not (isinstance(begun, tuple) and len(begun) == 2):
        raise UsageError(f"{told}: reset should return (observation, info), not {type(begun).__name__}")
    return begun[0]
