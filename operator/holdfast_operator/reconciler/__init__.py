"""The reconciler: pure rules from what is observed to what must be done."""
