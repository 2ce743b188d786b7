"""What the daemon serves to trainers: who may call, and what is answered."""
