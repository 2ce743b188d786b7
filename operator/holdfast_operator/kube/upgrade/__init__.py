"""Replacement of outdated daemons, and preparation of an uninstallation."""
