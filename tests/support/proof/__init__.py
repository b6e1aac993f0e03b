"""A proof that schedules of collectives are right: all ranks in lockstep, on symbols instead of numbers."""
