"""Which collectives a rank has called: what is compared with the calls of other ranks.

The last 64 of each group are most of the answer of a large job. So all but the last one are told as columns:
their numbers, fingerprints and texts, of which most are equal.
"""

from __future__ import annotations

from observability.job.answer import State


def shorten(group: State) -> None:
    """Leave of all recent collectives but the last what the functions below need."""
    earlier = group["recent"][1:]
    if not earlier:
        return
    texts: dict[str, int] = {}
    group["recent"] = group["recent"][:1]
    group["earlier"] = {
        "seqs": [each["seq"] for each in earlier],
        "fingerprints": [each["fingerprint"] for each in earlier],
        "text_of": [texts.setdefault(_text(each), len(texts)) for each in earlier],
        "texts": list(texts),
    }


def fingerprints(group: State) -> dict[int, str]:
    """Return what all ranks must agree on, of each recent collective of a group, by its number."""
    found = {each["seq"]: each["fingerprint"] for each in group["recent"]}
    if earlier := group.get("earlier"):
        found.update(zip(earlier["seqs"], earlier["fingerprints"], strict=True))
    return found


def text_of(group: State, seq: int) -> str:
    """Return the call of a number and its line; empty if it is not among the recent ones."""
    texts = [_text(each) for each in group["recent"] if each["seq"] == seq]
    if (earlier := group.get("earlier")) and seq in earlier["seqs"]:
        texts.append(earlier["texts"][earlier["text_of"][earlier["seqs"].index(seq)]])
    return texts[0] if texts else ""


def _text(operation: State) -> str:
    return f"{operation['call']} at {operation['where']}"
