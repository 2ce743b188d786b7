"""The copy engine: device to arena, hashed on the way, within bubbles if asked."""
