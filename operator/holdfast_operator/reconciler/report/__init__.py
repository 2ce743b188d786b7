"""What people are told: conditions, causes, recoveries, losses."""
