"""The daemon's services for trainers: authentication, requests, and arenas' descriptors."""
