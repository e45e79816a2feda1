"""What people read: every format is drawn from the same results."""
