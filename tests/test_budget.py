"""The budget of time of a test file: beyond it a line is printed, and only where CI asks for it the tests fail."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def budget(pytestconfig):
    """A budget of its own, of the plugin's class in tests/conftest.py."""
    (made,) = (plugin for plugin in pytestconfig.pluginmanager.get_plugins() if type(plugin).__name__ == "Budget")
    return type(made)()


CONFIG = SimpleNamespace(getoption=lambda name: False)


@pytest.mark.parametrize("wanted, failed", [("", False), ("error", True)])
def test_a_slow_file_fails_the_tests_only_where_that_is_asked_for(wanted, failed, budget, monkeypatch):
    monkeypatch.setenv("HPCDL_TEST_BUDGET", wanted)
    budget.busy.update({"tests/test_slow.py": 1e6, "tests/test_quick.py": 1.0, "tests/cluster/test_hosts.py": 1e6})
    session = SimpleNamespace(config=CONFIG, exitstatus=pytest.ExitCode.OK)
    budget.pytest_sessionfinish(session)
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)
    lines = []
    budget.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append), CONFIG)
    assert [line for line in lines if line.startswith("beyond")] == ["beyond its budget: tests/test_slow.py"]
    assert any(line.startswith("ERROR: tests/test_slow.py") for line in lines) == failed


def test_a_slower_machine_has_a_larger_budget(budget):
    budget.slower, budget.busy["tests/test_slow.py"] = 1.0, 1e6
    assert budget.beyond(CONFIG, 20) == ["tests/test_slow.py"]
    budget.slower = 1e6
    assert budget.beyond(CONFIG, 20) == []
