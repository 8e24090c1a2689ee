"""Recovery: supervised restarts, ULFM recovery in the job, respawned ranks, fail-over of servers."""
