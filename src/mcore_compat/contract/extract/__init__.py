"""Extract a contract from source."""
