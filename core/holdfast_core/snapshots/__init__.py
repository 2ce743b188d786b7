"""What is captured: units, layouts and shards; generations, manifests and reports of them."""
