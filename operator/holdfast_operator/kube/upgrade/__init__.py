"""Daemons that are renewed, and what an uninstallation leaves."""
