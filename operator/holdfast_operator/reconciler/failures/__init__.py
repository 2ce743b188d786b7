"""What a failure, a deadline or a notice leads to, apart from who takes part."""
