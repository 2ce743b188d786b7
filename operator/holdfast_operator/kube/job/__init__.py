"""The control loop of a job: it observes, decides, acts, and writes the status."""
