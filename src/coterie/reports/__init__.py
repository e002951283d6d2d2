"""Pictures and tables of what was done."""
