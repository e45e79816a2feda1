"""Find the first bad one: among releases, or among the commits of a git repository."""
