"""The fault drill: faults of ranks, phase by phase, and the recovery of the others."""
