"""Sessions: what a training script asks for, with a daemon and without one."""
