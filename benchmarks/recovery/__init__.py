"""`make bench NAME=recovery`: how long recoveries take, with processes that stay and without."""
