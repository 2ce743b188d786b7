"""What partial snapshots save and risk, computed from captured units; see `__main__`."""
