"""``dist2 bench``, and the harness under it: dist2 beside Gloo, Open MPI and MPICH on this machine.

`command` is the command; the other modules know nothing of it, and the scripts in ``benchmarks/`` use them
too: cases with checked results (`workloads`), crews of processes beside each other (`measuring`), peers,
reports and plots. Nothing in dist2's core imports this package.
"""
