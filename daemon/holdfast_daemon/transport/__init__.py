"""Bulk bytes between daemons: protocol, client, server and TLS."""
