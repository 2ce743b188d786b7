"""Which experts a snapshot captures, and which tokens a recovery loses for those it left out."""
