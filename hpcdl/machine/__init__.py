"""What this machine is and what would hurt a run: launchers and worlds, threads, facts, links between ranks, doctor."""
