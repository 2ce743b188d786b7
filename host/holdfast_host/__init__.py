"""What a process finds out about the machine that it runs on, for launchers and daemons."""
