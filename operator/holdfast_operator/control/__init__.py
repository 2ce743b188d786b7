"""Server of the control stream, which receives heartbeats and sends memberships, and its
certificates."""
