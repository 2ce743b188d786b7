"""Other daemons and the control loop, as gRPC."""
