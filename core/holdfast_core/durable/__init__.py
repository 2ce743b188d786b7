"""Copies in the durable tier: files, sets, schedule, retention and choice."""
