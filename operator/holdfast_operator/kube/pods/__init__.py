"""Pods and the objects that belong to them: made, read, recognized as ours."""
