"""The job as one: the state of all ranks, the rank that the others wait for, and the reason.

Theory of operation. Each control plane writes its address into the store of the group that it was started
with (`directory`). A rank describes itself as plain data (`state`, `stacks`): for each group the number of
the last collective, the operations in flight, the position of its main thread. Any rank can gather these
descriptions from all ranks (`gathering`, over a tree). A pure function (`diagnosis`) finds in them the rank
that each operation in flight waits for: a member is missing if it has not issued the number that another
member is inside of. So the data path carries nothing for this, and it works over every backend.

A thread per control plane (`watch`) looks each two seconds whether an operation of its own rank is older
than the limit. Only then does it ask, and only one rank: the first of the job that answers, which
gathers once for all that ask. It tells the missing ranks that they are waited for.
"""
