"""Names, overloads and queries by which torch's own code uses a group."""
