"""Compare finished runs: tables, intervals, paired tests, and the catalogue of methods."""
