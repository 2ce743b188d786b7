"""A job's control loop, from what is observed to what is done and written."""
