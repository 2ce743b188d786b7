"""Parts for torch.distributed.checkpoint: a reader and a loader of persisted sets, and a writer
into the memory tier."""
