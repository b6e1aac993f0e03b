"""Ranks that other engines start: `dist2.launch.ray`. ``python -m dist2.run`` starts ranks on one host."""
