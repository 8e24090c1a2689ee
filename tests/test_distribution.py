"""Wheel and sdist hold what git tracks; versions and dependencies are the same wherever they stand."""

import configparser
import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from hpcdl import __version__

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PYTHONS = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
OTHER_NAMES = {"duckdb": ("duckdb", "python-duckdb"), "PyYAML": ("py-pyyaml", "pyyaml")}  # of Spack and conda


def requirements(lines):
    """Names and bounds of requirements: {"numba": (">=0.61", "<0.69")}."""
    found = re.findall(r"^([\w-]+)(>=[\d.]+)(?:,(<[\d.]+))?", lines, re.MULTILINE)
    return {name: (least, below) for name, least, below in found}


def test_versions_agree():
    assert SETUP["metadata"]["version"] == "attr: hpcdl.__version__"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__
    assert SETUP["options"]["python_requires"] == f">={PYTHONS[0]}"
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}," in (ROOT / "README.md").read_text()
    assert f"for newest in {PYTHONS[-1]} " in (ROOT / ".ci" / "run").read_text()


def test_the_recipe_of_conda():
    recipe = yaml.safe_load((ROOT / "docs/packaging/conda/recipe.yaml").read_text())
    assert recipe["context"] == {"version": __version__, "python_min": PYTHONS[0]}
    expected = {"__linux", "python >=${{ python_min }}"}
    for name, bounds in requirements(SETUP["options"]["install_requires"]).items():
        expected.add(f"{OTHER_NAMES.get(name, (0, name))[1]} {','.join(filter(None, bounds))}")
    assert set(recipe["requirements"]["run"]) == expected and len(expected) == 12
    (build,) = re.findall(r'requires = \["setuptools(.*)"\]', (ROOT / "pyproject.toml").read_text())
    assert f"setuptools {build}" in recipe["requirements"]["host"]
    assert recipe["build"]["python"]["entry_points"] == SETUP["options.entry_points"]["console_scripts"].split("\n")[1:]
    check_description(recipe["about"]["summary"], recipe["about"]["license"])


def test_the_recipe_of_spack():
    recipe = (ROOT / "docs/packaging/spack/package.py").read_text()
    depends = dict(re.findall(r'depends_on\("([\w-]+)@([\d.:]+)', recipe))
    for extra in re.findall(r'variant\("(\w+)"', recipe):
        (name,) = re.findall(rf'depends_on\("py-([\w-]+)@.*when="\+{extra}"', recipe)
        assert depends.pop(f"py-{name}") == f"{requirements(SETUP['options.extras_require'][extra])[name][0][2:]}:"
    expected = {"python": f"{PYTHONS[0]}:{PYTHONS[-1]}", "py-setuptools": "77:"}
    for name, (least, below) in requirements(SETUP["options"]["install_requires"]).items():
        last = below and f"0.{int(below.removeprefix('<0.')) - 1}"  # Spack's ranges include their end
        expected[OTHER_NAMES.get(name, (f"py-{name}",))[0]] = f"{least[2:]}:{last}"
    assert depends == expected
    assert re.findall(r'version\("([\d.]+)"|hpcdl-([\d.]+)\.tar', recipe) == [("", __version__), (__version__, "")]
    check_description(re.search(r'"""(.*)\."""', recipe)[1], re.search(r'license\("(.*)"\)', recipe)[1])


def check_description(summary, license):
    assert (summary, license) == (SETUP["metadata"]["description"], SETUP["metadata"]["license"])


@pytest.mark.skipif("HPCDL_DIST" not in os.environ, reason="make dist builds what this looks at")
def test_wheel_and_sdist_hold_what_git_tracks(alone):
    folder = ROOT / os.environ["HPCDL_DIST"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    name = f"hpcdl-{__version__}"
    with tarfile.open(sdist) as file:
        held = {member.name.removeprefix(f"{name}/") for member in file if member.isfile()}
    assert {path for path in held if not path.startswith("hpcdl.egg-info/")} == {*tracked, "PKG-INFO"}
    places = {"hpcdl/": "hpcdl/", "kernels/": "hpcdl/kernels/", "scripts/": "hpcdl/scripts/"}
    places["slurm/"] = f"{name}.data/data/share/hpcdl/slurm/"
    expected = {to + path.removeprefix(top) for path in tracked for top, to in places.items() if path.startswith(top)}
    with zipfile.ZipFile(wheel) as file:
        held = {path for path in file.namelist() if not path.startswith(f"{name}.dist-info/")}
    assert held == expected and len(held) > 400
