"""Which experts a snapshot captures, and what recoveries cost those it left out."""
