"""What attention is: pure functions of one head."""
