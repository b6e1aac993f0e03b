"""What tests share: ranks as threads and processes, programs, stores, limits in time, oracles."""
