"""Incidents: the evidence of a failure or a hang of the job, in one folder that outlives its processes.

Theory of operation. Each rank writes its own part, before anything is closed: when an operation fails and
leaves its group of no use, when an uncaught exception ends the process, and when a control plane asks for it,
because the job waits; where none is, ranks find waits by themselves (`waits`). The parts of a job meet in one
folder: ranks that write within `folders.JOIN_S` of its creation join it. So no rank has to be alive but the
one that writes, and nothing is sent. Of a hang, the rank that has confirmed it writes the diagnosis and the
answers of all ranks as well.

`dist2 why FOLDER` and `dist2 report FOLDER` read the folder; ``torchfrtrace FOLDER`` reads the dumps in it.
"""
