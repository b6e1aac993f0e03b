"""Messages of a group over links: posted, sent, matched and ended; and what members tell of the group."""
