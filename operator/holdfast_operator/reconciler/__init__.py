"""The reconciler: pure rules that derive what must be done from what is observed."""
