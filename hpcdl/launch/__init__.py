"""From a command line to a run: checks of the launch, programs, nested command lines, many runs in one job."""
