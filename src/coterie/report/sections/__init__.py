"""The sections of a report: functions from runs to markup, empty if there is nothing to show."""
