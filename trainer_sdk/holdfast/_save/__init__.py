"""One save, from its task to the commit."""
