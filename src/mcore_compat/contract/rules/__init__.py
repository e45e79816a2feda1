"""Rules as data: what a change between two contracts means."""
