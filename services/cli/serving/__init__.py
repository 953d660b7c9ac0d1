"""`streetcar bench serve`: one fixed workload over HTTP, and what came of it."""
