"""Diagnostics of communication: watchdog, deadlock, flight recorder, collective checker."""
