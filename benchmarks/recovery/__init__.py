"""`make bench-recovery`: how long recoveries take, with processes that stay and without."""
