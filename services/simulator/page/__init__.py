"""The pictures of batching, drawn from simulated runs: one page of HTML, or PNG files."""
