"""torch.distributed.checkpoint: reader, writer and loader of persisted sets."""
