"""The part of `holdfast check` that runs in the training process."""
