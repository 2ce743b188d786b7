"""Choice of the experts in a snapshot, and the tokens that recoveries lose for the others."""
