"""Where the members of a group on one host meet: fences in shared memory, and what is around them."""
