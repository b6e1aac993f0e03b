"""Helpers that tests share: ranks as threads and processes, programs, stores, time limits, oracles."""
