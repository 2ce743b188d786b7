"""`make bench-loss`: what recoveries under partial snapshots do to the example's loss."""
