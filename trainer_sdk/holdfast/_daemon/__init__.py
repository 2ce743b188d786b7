"""Session with the node's daemon: client, link, proof of identity, stages."""
