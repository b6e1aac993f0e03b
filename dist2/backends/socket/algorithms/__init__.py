"""The collectives as schedules: one file an algorithm, each a pure function of rank and sizes.

Message algorithms move data by `Exchange` steps. Flat ones work on shared memory: `Copy`, `Fold` and
`Fence` on ``SLOT`` spans. ``selection.py`` names them and chooses.

**Addressing.** ``INPUT`` and ``OUTPUT`` are the tensors in the tables of ``backends/base.py``, each list of
tensors read as one concatenation, parts in rank order. `counts` are elements a part.

==============  ==================================  ===================================  ===============
family          ``INPUT``                           ``OUTPUT``                           same memory?
==============  ==================================  ===================================  ===============
all_reduce      numel                               numel                                may be
broadcast       numel (read at the root)            numel                                may be
reduce          numel                               numel at the root                    may be
all_gather      counts[rank]                        sum(counts)                          own part may be
reduce_scatter  sum(counts)                         counts[rank]                         own part may be
gather          counts[rank]                        sum(counts) at the root              own part may be
scatter         sum(counts) at the root             counts[rank]                         own part may be
all_to_all      parts to rank 0, 1, ...             parts from rank 0, 1, ...            never
barrier         nothing                             nothing
==============  ==================================  ===================================  ===============

"May be" means that a schedule is right whether the memory is shared or not. ``INPUT`` is never
written, unless it is ``OUTPUT``. The ``_single``, ``_v`` and coalesced spellings are the same
families: an operation on several tensors lists the pieces of part 0, then those of part 1, and so on.

**Order.** An algorithm is *ordered* where every element it reduces is one `Fold` of all
contributions from rank 0 to the last: then floats come out bitwise equal on all ranks, at all offsets
and from all ordered algorithms. The others serve exact reductions and ``deterministic=False``.

**Slots.** Shared memory has two slots a rank, and flat programs use them in turn. Every flat schedule of two
ranks or more has a `Fence`, also if there is nothing to move. A rank that writes a slot again has therefore
passed a fence of the schedule in between, which all ranks entered after their last read of the slot. So no
schedule needs a fence at its end.
"""
