"""What follows from a failure, a deadline or a notice, apart from who takes part."""
