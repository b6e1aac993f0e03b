"""Side-by-side benchmarks: dist2 beside Gloo, Open MPI and MPICH on this machine, and the tuning of dist2.

Nothing in dist2's core imports this package; it needs the extra ``bench``.
"""
