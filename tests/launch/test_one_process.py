"""Programs of one process under a launcher: one of the ranks does the work, and none waits for another."""


def test_a_plan_under_a_launcher_is_made_once(launch):
    done = launch(3, "-m", "hpcdl", "plan", "memory", check=0)  # it starts MPI, late, on the rank that does it
    assert done.stdout.count("gpt3 ") == 1, done.stdout


def test_what_is_refused_is_said_once(launch):
    done = launch(2, "-m", "hpcdl", "export-metrics", "nowhere", check=2)
    assert done.stderr.count("export-metrics: error: ") == 1, done.stderr
