"""The commands that control planes and incidents answer: ``dist2 why``, ``dist2 top``, and more."""
