"""The job as one: the state of all ranks, the rank that the others wait for, and the reason.

Theory of operation. Each control plane writes its address into the store of the group that it was started
with (`directory`). A rank describes itself as plain data (`state`, `stacks`): per group the number of the
collective issued last, what is in flight, where its main thread stands. Any rank can gather these from all
(`gathering`, over a tree), and a pure function says from them which rank each operation in flight waits for
(`diagnosis`): a member that has not issued a number that another member is inside of is missing. So the data
path carries nothing for this, and it works over every backend.

A thread per control plane (`watch`) looks about once a second whether an operation of its own rank is older
than the limit. Only then is anybody asked, and only one rank: the first of the job that answers, which
gathers once for all that ask. It tells the missing ranks that they are waited for.
"""
