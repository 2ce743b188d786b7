"""What is captured (units, layouts, shards), and how it is named, stored and reported."""
