"""Sessions: the interface of training scripts, with a daemon and without one."""
