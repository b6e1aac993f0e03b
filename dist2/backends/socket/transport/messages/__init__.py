"""Messages of a group over links: posted, sent, matched, completed; and reports about members."""
