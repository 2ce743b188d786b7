"""Records that daemons publish about jobs, and how readers interpret them."""
