"""The machine: launchers and worlds, threads, facts, hardware reports, network links, doctor."""
