"""The fault drill: what happens to ranks, phase by phase, and how the others go on."""
