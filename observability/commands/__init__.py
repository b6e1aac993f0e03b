"""The commands that the control planes of a job answer: ``dist2 why``, ``dist2 top``, ``dist2 trace``."""
