"""Connections between processes: made, proved, written to, watched, dropped; for all groups of a process."""
