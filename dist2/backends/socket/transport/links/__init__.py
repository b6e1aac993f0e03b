"""Connections between processes, used by all groups: made, authenticated, watched, dropped."""
