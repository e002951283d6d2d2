"""A leaderboard: many methods on many benchmarks, each tuned with the same budget on validation samples."""

from coterie.papers.leaderboard.files import BoardFolder
from coterie.papers.leaderboard.rules import Benchmark, BoardRules, read_rules
from coterie.papers.leaderboard.running import jobs_left, run_board
from coterie.papers.leaderboard.summary import all_methods, summary

__all__ = [
    "Benchmark",
    "BoardFolder",
    "BoardRules",
    "all_methods",
    "jobs_left",
    "read_rules",
    "run_board",
    "summary",
]
