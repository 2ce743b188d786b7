"""`make bench NAME=loss`: effect of recoveries under partial snapshots on the example's loss."""
