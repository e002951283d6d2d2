"""The HTML report, the live page, and charts."""
