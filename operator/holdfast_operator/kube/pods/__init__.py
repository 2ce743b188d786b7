"""Pods and the objects that belong to them: how they are made, read, and recognized as ours."""
