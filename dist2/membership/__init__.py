"""Groups made from groups: split, shrink, agree, revoke, merge."""
